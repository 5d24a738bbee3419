"""One optimizer step: what a bad gradient must not touch, and what every part of the batch is for."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.config.schema import Config
from ngpt_train.models import export_weights, load_weights
from ngpt_train.training import build_state, train_step
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import StepResult
from tests.properties.architectures import ARCHITECTURES, SMALL, shapes
from tests.properties.runs import infinite_loss, run_config, text_like_rows
from tests.reference import ngpt
from tests.reference.training import Recipe, train

STEPS, ROWS, T = 20, 4, 16
RECIPES = {
    "gpt": Recipe(STEPS, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=3),
    "ngpt": Recipe(STEPS, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0),
    "powernorm": Recipe(STEPS, 3e-3, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=3),
}
both = pytest.mark.parametrize("name", ["gpt", "ngpt"])


def step_config(name: str, parallel: str = "single") -> Config:
    """Two micro batches a step, each architecture as it would be trained."""
    return run_config(name, SMALL, RECIPES[name], rows=ROWS, context=T, micro_rows=ROWS // 2, parallel=parallel)


def micro_batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    tokens, targets = text_like_rows(ROWS, T, SMALL.vocab_size, seed)
    return list(zip(tokens.chunk(2), targets.chunk(2), strict=True))


@contextmanager
def nan_in_one_gradient(state: TrainState) -> Iterator[None]:
    def poison(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        return gradient

    handle = next(p for p in state.model.parameters() if p.ndim == 1).register_hook(poison)
    yield
    handle.remove()


Poison = Callable[[TrainState], AbstractContextManager[None]]
poisons = pytest.mark.parametrize("poison", [nan_in_one_gradient, infinite_loss])


def adam(state: TrainState) -> list[Tensor]:
    """Step counts and both moments of all parameters."""
    held = [state.optimizer.state[p] for p in state.model.parameters()]
    return [moments[key].clone() for moments in held for key in ("step", "exp_avg", "exp_avg_sq")]


def bits(state: TrainState) -> dict[str, Tensor]:
    """What this rank holds of every parameter, bit by bit."""
    held = {name: p.detach() for name, p in state.model.named_parameters()}
    return {name: (p.to_local() if isinstance(p, DTensor) else p).clone().view(torch.int32) for name, p in held.items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [key for key, x in expected.items() if not torch.equal(actual[key], x)] == []


@pytest.mark.parametrize("parallel", ["single", "ddp", "fsdp"])
@poisons
@pytest.mark.parametrize("name", ["gpt", "ngpt", "powernorm"])
def test_a_bad_gradient_moves_nothing(name: str, poison: Poison, parallel: str) -> None:
    """Caught: the projection of a skipped step, which moves rows of length 1 by a rounding."""
    state = build_state(step_config(name, parallel))
    for seed in range(2):
        assert not train_step(state, micro_batches(seed)).skipped
    weights, moments = bits(state), adam(state)
    with poison(state):
        result = train_step(state, micro_batches(2))
    assert result.skipped
    assert not result.grad_norm.isfinite()
    assert_same_bits(bits(state), weights)
    assert all(torch.equal(now, before) for now, before in zip(adam(state), moments, strict=True))
    assert all(p.grad is None for p in state.model.parameters())
    # The batch was consumed all the same: the schedule and the count of tokens go on.
    assert state.step == 3
    assert int(state.tokens) == sum(int((targets != -100).sum()) for s in range(3) for _, targets in micro_batches(s))


def test_an_infinite_gradient_is_a_bad_one() -> None:
    """Caught: NaN alone looked for, which an infinite loss happens to leave as well."""
    state = build_state(step_config("gpt"))
    gain = next(p for p in state.model.parameters() if p.ndim == 1)
    gain.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    result = train_step(state, micro_batches(0))
    assert result.grad_norm.isinf()
    assert result.skipped


@poisons
@both
def test_training_goes_on_as_if_the_bad_steps_had_not_been(name: str, poison: Poison) -> None:
    """Also where the first step of all is bad. The lr is constant, or the schedule would tell."""
    config = step_config(name)
    config = replace(config, schedule=replace(config.schedule, kind="wsd", warmup_steps=0))

    def run(bad: set[int]) -> tuple[list[StepResult], TrainState]:
        state = build_state(config)
        results, good = [], 0
        for step in range(6 + len(bad)):
            if step in bad:
                with poison(state):
                    assert train_step(state, micro_batches(99)).skipped
            else:
                results.append(train_step(state, micro_batches(good)))
                good += 1
        return results, state

    (disturbed, state), (quiet, expected) = run({0, 3, 4}), run(set())
    for now, then in zip(disturbed, quiet, strict=True):
        assert not now.skipped
        assert now.lr == then.lr == RECIPES[name].lr
        assert now.loss == then.loss
    assert quiet[-1].loss < 0.95 * quiet[0].loss
    assert {int(moments["step"]) for moments in state.optimizer.state.values()} == {6}
    assert_same_bits(bits(state), bits(expected))


@both
def test_fp64_without_clipping_is_the_plain_loop(name: str) -> None:
    """In fp64 nothing hides: every step to 1e-12, with two micro batches of unequal numbers of targets."""
    config = step_config(name)
    state = build_state(replace(config, optim=replace(config.optim, clip_norm=None)))
    state.model.double()
    weights = ARCHITECTURES[name].random_weights(shapes(ARCHITECTURES[name], SMALL), 0)
    load_weights(state.model, weights)
    batches = [micro_batches(seed) for seed in range(5)]
    results = [train_step(state, batch) for batch in batches]
    forward = partial(ARCHITECTURES[name].forward, n_heads=SMALL.n_heads)
    recipe = replace(RECIPES[name], clip_norm=float("inf"))
    expected = train(forward, ngpt.project if name == "ngpt" else lambda _: None, weights, batches, recipe)
    for result, (loss, norm) in zip(results, expected, strict=True):
        assert result.loss.dtype == torch.float64
        assert result.loss.item() == pytest.approx(loss, rel=1e-12)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-12)
    assert max(norm for _, norm in expected) > RECIPES[name].clip_norm, "clipping would not show"
    final = export_weights(state.model)
    for key, x in weights.items():
        torch.testing.assert_close(final[key], x, rtol=1e-10, atol=1e-12, msg=key)


@both
def test_documents_reach_the_model(name: str) -> None:
    state = build_state(step_config(name))
    batches = [(*batch, torch.arange(T).expand(ROWS // 2, T) // 5) for batch in micro_batches(0)]
    with torch.no_grad():
        alone = sum(float(state.model.loss(*batch)[0]) for batch in batches)
        together = sum(float(state.model.loss(*batch[:2])[0]) for batch in batches)
    result = train_step(state, batches)
    assert result.loss.item() == pytest.approx(alone / int(result.n_tokens), rel=1e-6)
    assert abs(together / alone - 1) > 1e-5, "documents would not show"


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([], "no micro batches"),
        (
            [(torch.zeros(2, T, dtype=torch.int32), torch.zeros(2, T, dtype=torch.int64))],
            "micro batch 0 holds torch.int32",
        ),
    ],
)
def test_what_a_step_does_not_take(batches: list[tuple[Tensor, Tensor]], says: str) -> None:
    state = build_state(step_config("gpt"))
    with pytest.raises(ValueError, match=says):
        train_step(state, batches)
    assert state.step == 0
