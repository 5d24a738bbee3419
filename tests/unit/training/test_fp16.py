"""fp16: the loss scale changes no result, falls when a gradient overflows, rises again, and is part of the state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.cross_entropy import linear_cross_entropy
from ngpt_train.optim import loss_scale
from ngpt_train.optim.loss_scale import LossScale
from ngpt_train.training import StepResult, build_state, loop, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.guards import NumericalError
from ngpt_train.training.state import TrainState
from tests.properties.architectures import ARCHITECTURES, SMALL
from tests.properties.runs import held, micro_batches, run_config, text_like_rows
from tests.reference.training import Recipe
from tests.stored import save_state
from tests.unit.training.test_loop import loop_config, run
from tests.unit.training.test_waits import TINY, Waits

ROWS, T = 4, 32
SIZE = replace(SMALL, source_context=10)
RECIPE = Recipe(20, 3e-3, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.2, warmup_steps=3)
NAMES = [name for name in ARCHITECTURES if "+" not in name]


def config(name: str, *options: str) -> Config:
    if name == "normformer":  # so narrow an embedding learns more slowly below sinusoids
        options = (*options, "model.positions=rotary")
    return run_config(
        name, SIZE, RECIPE, rows=ROWS, context=T, micro_rows=ROWS // 2, parallel="single", options=options
    )


def steps(state: TrainState, name: str, n: int) -> list[StepResult]:
    numbers = range(state.step, state.step + n)
    return [train_step(state, micro_batches(name, SIZE, ROWS, T, step)) for step in numbers]


def bits(state: TrainState) -> dict[str, Tensor]:
    """Weights, moments, step counts and running statistics."""
    return held(state) | {name: value.clone() for name, value in state.model.statistics().items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, x in expected.items() if not torch.equal(actual[name], x)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_power_of_two_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where nothing overflows, a loss scale that doubles every second step leaves every bit as it is without
    one: weights, moments, PowerNorm's nu, the loss and the gradient norm. Caught: gradients that are clipped, measured
    or given to Adam while they are scaled; a scale that nu does not know."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    plain, scaled = build_state(config(name)), build_state(config(name))
    scaled.loss_scale = LossScale(scaled.world.device)
    expected, actual = steps(plain, name, 6), steps(scaled, name, 6)
    assert [float(result.loss_scale) for result in actual] == [2.0**16 * 2**k for k in (0, 0, 1, 1, 2, 2)]
    for result, one in zip(actual, expected, strict=True):
        assert (result.loss, result.grad_norm) == (one.loss, one.grad_norm)
        assert not result.skipped
    assert max(float(result.grad_norm) for result in expected) > RECIPE.clip_norm, "clipping would not show"
    assert_same_bits(bits(scaled), bits(plain))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_fp16_trains_as_fp32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of 12 steps to 1e-3: fp16 rounds to 5e-4. Caught: half precision where fp32 is promised, as in a norm's
    statistics; gradients that vanish."""
    monkeypatch.setattr(loss_scale, "START", 2.0**10)  # NormFormer's first gradients overflow with 2^16
    exact, near = (steps(build_state(config(name, f"train.precision={of}")), name, 12) for of in ("fp32", "fp16"))
    assert not any(result.skipped for result in near)
    losses = [[float(result.loss) for result in results] for results in (near, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != losses[1], "nothing was computed in fp16"
    assert losses[1][-1] < 0.97 * losses[1][0]
    norms = [[float(result.grad_norm) for result in results] for results in (near, exact)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


class Overflow:
    """Gradients of a state's next steps overflow while `on`."""

    def __init__(self, state: TrainState) -> None:
        self.on = False
        parameter = next(p for p in state.model.parameters() if p.ndim == 1)
        parameter.register_hook(lambda gradient: gradient * torch.inf if self.on else gradient)


@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_an_overflow_halves_the_scale_and_moves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a growth that counts steps before the overflow, one without an end, a scale below 1."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    monkeypatch.setattr(loss_scale, "START", 2.0**10)
    monkeypatch.setattr(loss_scale, "LARGEST", 2.0**11)
    state = build_state(config(name, "train.precision=fp16"))
    overflow = Overflow(state)
    steps(state, name, 2)
    before = bits(state)
    overflow.on = True
    (result,) = steps(state, name, 1)
    assert result.skipped
    assert result.loss_scale == 2.0**10
    assert_same_bits(bits(state), before)
    overflow.on = False
    scales = [float(result.loss_scale) for result in steps(state, name, 10)]
    assert scales == [2.0**9] * 3 + [2.0**10] * 3 + [2.0**11] * 4
    overflow.on = True
    scales = [float(result.loss_scale) for result in steps(state, name, 13)]
    assert scales == [2.0 ** max(0, 11 - k) for k in range(13)]


def test_only_overflows_without_a_remedy_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a run that ends while its scale is still falling; one that never ends."""
    state = build_state(loop_config(40, "train.precision=fp16", "logging.every=1"))
    overflow = Overflow(state)
    taken: list[StepResult] = []

    def until_it_fits(state: TrainState, micro_batches: Any, **options: Any) -> StepResult:
        assert state.loss_scale is not None
        overflow.on = bool(state.loss_scale.value > largest_that_fits)
        taken.append(train_step(state, micro_batches, **options))
        return taken[-1]

    monkeypatch.setattr(loop, "train_step", until_it_fits)
    largest_that_fits = 2.0**2
    records = [record for record in run(state) if record["kind"] == "train"]
    assert [record["loss_scale"] for record in records] == [2.0 ** max(2, 16 - k) for k in range(40)]
    assert [record["skipped"] for record in records] == [int(k < 14) for k in range(40)]

    state = build_state(loop_config(40, "train.precision=fp16", "logging.every=1"))
    overflow, largest_that_fits = Overflow(state), 0.0
    taken.clear()
    with pytest.raises(NumericalError, match=r"^10 steps in a row, up to step 26.*loss scale is 1.*another precision"):
        run(state)
    assert len(taken) == 16 + 10


def test_a_resume_knows_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a scale that begins anew, or its count of good steps."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 5)
    given = config("powernorm", "train.precision=fp16")
    state = build_state(given)
    overflow = Overflow(state)
    overflow.on = True
    steps(state, "powernorm", 1)
    overflow.on = False
    steps(state, "powernorm", 3)
    kept = save_state(Checkpoints(tmp_path, state.world, keep_last=1, keep_every=None), state)
    again = build_state(given)
    load_state(kept, again)
    expected, actual = steps(state, "powernorm", 4), steps(again, "powernorm", 4)
    assert [float(result.loss_scale) for result in actual] == [2.0**15, 2.0**15, 2.0**16, 2.0**16]
    for result, one in zip(actual, expected, strict=True):
        assert (result.loss, result.grad_norm, result.loss_scale) == (one.loss, one.grad_norm, one.loss_scale)
    assert_same_bits(bits(again), bits(state))


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "ngpt"])
def test_triton_takes_fp16_and_nobody_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a kernel that knows bf16 alone; a loss scale that the host reads."""
    monkeypatch.setattr(loss_scale, "START", 2.0**10)
    losses, weights = [], []
    for kernels in ("torch", "triton"):
        options = ["train.precision=fp16", f"kernels={kernels}"]
        given = run_config(name, TINY, RECIPE, rows=1, context=4, micro_rows=1, parallel="single", options=options)
        with dispatch.chosen(kernels):
            state = build_state(given)
            for step in range(2):
                batch = text_like_rows(1, 4, TINY.vocab_size, step)
                with Waits() as waits:
                    result = train_step(state, [batch])
                assert waits.seen == []
                assert not result.skipped
                losses.append(float(result.loss))
            weights.append(held(state))
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-3)
    assert any(not torch.equal(weights[0][key], x) for key, x in weights[1].items()), "Triton's kernels did not run"


def test_other_precisions_have_no_scale() -> None:
    state = build_state(config("gpt", "train.precision=bf16"))
    assert state.loss_scale is None
    assert steps(state, "gpt", 1)[0].loss_scale is None
    with pytest.raises(ConfigError, match=r"fp32, bf16 or fp16"):
        config("gpt", "train.precision=half")


@pytest.mark.parametrize("factor", [3e-8, 1e5])
def test_the_loss_of_fp16_takes_any_factor(factor: float) -> None:
    """The factor of the summed loss, loss scale / number of targets, may be one that fp16 does not hold; the gradients
    are those of fp32 to fp16's rounding, 1e-3. Caught: a factor that is cast to fp16."""
    torch.manual_seed(0)
    h, matrix, targets = torch.randn(8, 16) * factor**0.5, torch.randn(11, 16) * factor**-0.5, torch.randint(11, (8,))
    found = []
    for dtype in (torch.float32, torch.float16):
        x, w = h.clone().to(dtype).requires_grad_(), matrix.clone().requires_grad_()
        (linear_cross_entropy(x, w, targets)[0] * factor).backward()
        assert x.grad is not None
        assert w.grad is not None
        found.append((x.grad.float(), w.grad))
    for exact, near in zip(*found, strict=True):
        assert (near - exact).norm() < 1e-2 * exact.norm()
