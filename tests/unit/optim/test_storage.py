"""optim.storage=bf16: what is kept between steps is what bf16 holds of fp32's step."""

import copy
from typing import Any

import pytest
import torch

from ngpt_train.training import build_state, train_step
from tests.properties.architectures import SMALL
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)


@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_a_step_is_fp32s_rounded(name: str) -> None:
    """Caught: weights or moments that stay fp32, as if there were a master; tables or vectors that do not; first
    weights that are not rounded; a rounding before the projection."""

    def state_of(storage: str) -> Any:
        options = [f"optim.storage={storage}"]
        return build_state(
            run_config(name, SMALL, RECIPE, rows=4, context=16, micro_rows=4, parallel="single", options=options)
        )

    def kept(state: Any, rounded: bool) -> dict[str, torch.Tensor]:
        found = {}
        for key, parameter in state.model.named_parameters():
            tensors = {"w": parameter.detach()}
            tensors |= {x: state.optimizer.state[parameter][x] for x in ("exp_avg", "exp_avg_sq") if state.step}
            in_block = parameter.ndim == 2 and key.startswith("layers.")
            for part, tensor in tensors.items():
                found[f"{key} {part}"] = tensor.bfloat16().float() if rounded and in_block else tensor.clone()
        return found

    state, losses = state_of("bf16"), []
    plain = state_of("fp32")
    assert all(torch.equal(x, y) for x, y in zip(kept(state, False).values(), kept(plain, True).values(), strict=True))
    for step in range(4):
        plain.model.load_state_dict(state.model.state_dict())
        plain.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
        plain.step = state.step
        batch = text_like_rows(4, 16, SMALL.vocab_size, 0)
        losses.append(float(train_step(state, [batch]).loss))
        train_step(plain, [batch])
        expected, unrounded = kept(plain, True), kept(plain, False)
        found = kept(state, False)
        assert not [key for key in expected if not torch.equal(found[key], expected[key])], step
        assert [key for key in expected if not torch.equal(found[key], unrounded[key])]
    assert losses[-1] < 0.95 * losses[0]
