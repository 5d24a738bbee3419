"""The moving average of the weights follows its formula, and no skipped step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.models import load_weights
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import ARCHITECTURES, SMALL, shapes
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe
from tests.unit.training.test_waits import Waits

RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)


@pytest.mark.parametrize("decay", [0.3, 0.9])
@pytest.mark.parametrize("name", ["normformer", "ngpt"])
def test_the_formula(name: str, decay: float) -> None:
    """To fp32's rounding, from weights that were loaded before step 0. Caught: a start from other weights or from 0, a
    correction for the start, shares the wrong way round, a skipped step that counts, a host that waits."""
    config = run_config(
        name, SMALL, RECIPE, rows=4, context=16, micro_rows=4, parallel="single", options=[f"optim.ema_decay={decay}"]
    )
    state = build_state(config)
    assert state.ema is not None
    load_weights(state.model, ARCHITECTURES[name].random_weights(shapes(ARCHITECTURES[name], SMALL), 5))
    expected = {key: x.double() for key, x in parameters(state.model).items()}
    vector = next(p for p in state.model.parameters() if p.ndim == 1)
    vector.register_hook(lambda gradient: gradient * torch.nan if state.step == 2 else gradient)
    for step in range(6):
        before = {key: x.clone() for key, x in state.ema.weights.items()}
        batch = text_like_rows(4, 16, SMALL.vocab_size, step)
        with Waits() as waits:
            result = train_step(state, [batch])
        assert waits.seen == []
        assert bool(result.skipped) == (step == 2)
        for key, w in parameters(state.model).items():
            if step == 2:
                assert torch.equal(state.ema.weights[key], before[key])
            else:
                expected[key] = decay * expected[key] + (1 - decay) * w.double()
            assert (state.ema.weights[key] - expected[key]).abs().max() <= 1e-6 * expected[key].abs().max(), key
    moved = [key for key, w in parameters(state.model).items() if not torch.equal(w, state.ema.weights[key])]
    assert len(moved) == len(expected)


def parameters(model: Any) -> dict[str, Tensor]:
    return {key: p.detach() for key, p in model.named_parameters()}
