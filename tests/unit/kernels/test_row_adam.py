"""RowAdam is torch's Adam with another implementation: same weights, same state, same checkpoints."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.optim import OptimConfig
from ngpt_train.kernels import dispatch
from ngpt_train.models import build_model, export_weights
from ngpt_train.optim import row_adam
from ngpt_train.optim.fused_adam import FusedAdam
from ngpt_train.optim.gated_adam import GatedAdam
from ngpt_train.optim.optimizer import build_optimizer
from ngpt_train.optim.row_adam import RowAdam
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.state import TrainState
from tests.properties.architectures import ARCHITECTURES, SMALL, VARIANTS, config, jittered
from tests.properties.runs import held, run_config, text_like_rows
from tests.reference.training import Recipe
from tests.stored import save_state

pytestmark = pytest.mark.skipif(not dispatch.interpreted(), reason="models are on the CPU, as the interpreter")
ROWS, T = 4, 24
SPHERE = Recipe(20, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0)
BASELINE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=0.5, warmup_steps=0)
# Name, changes to the recipe, options, and where the rows stay.
RUNS = {
    "ngpt": ("ngpt", {}, [], "sphere"),
    "ngpt adamw, tied": ("ngpt", {}, ["optim.name=adamw", "model.tied_embeddings=true"], "sphere"),
    "ngpt ball": ("ngpt", {}, ["model.constraint=ball"], "ball"),
    "ngpt parametrization": ("ngpt", {}, ["model.constraint=parametrization"], "free"),
    "ngpt nugpt": ("ngpt", {"eps": 1e-16}, ["recipe=nugpt", "model.reference.d_model=8"], "sphere"),
    "ngpt with a cap": ("ngpt", {}, ["optim.angle_cap=0.02"], "sphere"),
    "gpt": ("gpt", {}, [], "free"),
    "gpt adam, not clipped": ("gpt", {"weight_decay": 0.0, "clip_norm": "null"}, ["optim.name=adam"], "free"),
    "normformer": ("normformer", {}, [], "free"),
}


@pytest.fixture(autouse=True)
def optimizer_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter takes its time: models do without it."""
    step = RowAdam.step

    def on_triton(self: RowAdam, closure: None = None) -> None:
        with dispatch.chosen("triton"):
            step(self, closure)

    monkeypatch.setattr(RowAdam, "step", on_triton)
    with dispatch.chosen("torch"):
        yield


def settings(run: str) -> Config:
    name, changes, options, _ = RUNS[run]
    recipe = replace(SPHERE if ARCHITECTURES[name].on_sphere else BASELINE, **changes)
    return run_config(name, SMALL, recipe, rows=ROWS, context=T, micro_rows=ROWS, parallel="single", options=options)


def built(run: str, kernels: str) -> TrainState:
    config = settings(run)
    config.kernels.kind = kernels
    with dispatch.chosen(kernels):
        return build_state(config)


def train(state: TrainState, steps: int) -> list[float]:
    """Losses; step k has the same batch in every run."""
    numbers = range(state.step, state.step + steps)
    return [train_step(state, [text_like_rows(ROWS, T, SMALL.vocab_size, step)]).loss.item() for step in numbers]


def furthest(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(((actual[key] - x).norm() / x.norm().clamp(min=1e-30)).item() for key, x in expected.items())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("run", RUNS)
def test_trains_as_torch(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: rows divided where the architecture does not, or twice; vectors left out; no decay, or decay of all."""
    ours, torchs = built(run, "triton"), built(run, "torch")
    assert isinstance(ours.optimizer, RowAdam)
    assert type(torchs.optimizer) is FusedAdam
    start = export_weights(ours.model)
    monkeypatch.setattr(ours.model, "project_", lambda: pytest.fail("a second pass over the rows"))
    losses, expected = train(ours, 1), train(torchs, 1)
    assert furthest(held(ours), held(torchs)) < 1e-6  # of gradients equal to the last bit
    assert losses + train(ours, 1) == pytest.approx(expected + train(torchs, 1), rel=1e-5)
    assert furthest(export_weights(ours.model), start) > 0.02
    lengths = torch.cat([x.detach().norm(dim=1) for x in ours.model.parameters() if x.ndim == 2])
    assert ((lengths - 1).abs().max() < 1e-6) == (RUNS[run][-1] == "sphere")
    assert (lengths.max() < 1 + 1e-6) == (RUNS[run][-1] != "free")


@pytest.mark.parametrize("name", ARCHITECTURES | VARIANTS)
def test_what_project_does_is_what_the_groups_say(name: str) -> None:
    """Caught: an architecture whose projection RowAdam would leave out, or a projection that it would add."""
    model, _ = jittered((ARCHITECTURES | VARIANTS)[name], SMALL, torch.float32)
    said = {key for group in model.parameter_groups() if group.constraint != "free" for key in group.names}
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(3)
    before = {key: x.detach().clone() for key, x in model.named_parameters()}
    model.project_()
    for key, x in model.named_parameters():
        expected = before[key] / before[key].norm(dim=1, keepdim=True) if key in said else before[key]
        torch.testing.assert_close(x.detach(), expected, rtol=1e-6, atol=1e-7)


def test_groups_have_torchs_keys() -> None:
    """Caught: a key in a group that a checkpoint of torch's does not have, which then does not load."""
    model = build_model(config(ARCHITECTURES["gpt"], SMALL))
    for name, decay in (("adamw", 0.1), ("adam", 0.0)):
        chosen = OptimConfig(name=name, weight_decay=decay)
        with dispatch.chosen("triton"):
            ours = build_optimizer(model, model.parameter_groups(), chosen)
        torchs = build_optimizer(model, model.parameter_groups(), chosen)
        assert isinstance(ours, RowAdam)
        assert not isinstance(torchs, RowAdam)
        for mine, other in zip(ours.param_groups, torchs.param_groups, strict=True):
            assert {key: x for key, x in mine.items() if key != "params"} == {
                key: x for key, x in other.items() if key != "params"
            }
            assert [id(x) for x in mine["params"]] == [id(x) for x in other["params"]]


def test_weights_in_fp64_stay_with_torch() -> None:
    """Caught: a kernel of fp32 for them, found out in the first step."""
    model = build_model(config(ARCHITECTURES["ngpt"], SMALL)).double()
    with dispatch.chosen("triton"):
        assert type(build_optimizer(model, model.parameter_groups(), OptimConfig())) is FusedAdam


def test_a_gate_has_no_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Caught: a gate that is dropped where the Triton kernel runs, or dropped silently the other way."""
    model = build_model(config(ARCHITECTURES["ngpt"], SMALL))
    with dispatch.chosen("triton"):
        chosen = build_optimizer(model, model.parameter_groups(), OptimConfig(gate_power=0.5))
    assert type(chosen) is GatedAdam
    assert "adam runs in plain PyTorch, because its kernel does not know optim.gate_power=0.5" in caplog.text


@pytest.mark.parametrize(("run", "before", "bad"), [("ngpt", 0, torch.nan), ("gpt", 1, torch.inf)])
def test_a_bad_gradient_moves_nothing(run: str, before: int, bad: float) -> None:
    """Bit for bit, also in the first step of all. Caught: steps counted that were not, rows divided all the same."""
    state = built(run, "triton")
    train(state, before)
    weights = held(state)
    hook = state.model.embedding.register_hook(lambda gradient: gradient + bad)
    train(state, 1)
    hook.remove()
    after = held(state)
    assert state.step == before + 1
    for key, x in after.items():
        expected = weights.get(key, torch.zeros_like(x))  # the moments come into being with the first step
        assert torch.equal(x, expected), key
    train(state, 1)
    moments = [x for key, x in held(state).items() if key.endswith(".step")]
    assert {int(x) for x in moments} == {before + 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("run", "first", "then"), [("ngpt", "torch", "triton"), ("gpt", "triton", "torch"), ("ngpt", "triton", "triton")]
)
def test_resume(run: str, first: str, then: str, tmp_path: Path) -> None:
    """Caught: state under other names, a step count on the host, rows divided on loading."""
    saved = built(run, first)
    losses = train(saved, 2)
    kept = save_state(Checkpoints(tmp_path, saved.world, keep_last=1, keep_every=None), saved)
    resumed = built(run, then)
    load_state(kept, resumed)
    assert isinstance(resumed.optimizer, RowAdam) == (then == "triton")
    expected = held(saved)
    for key, x in held(resumed).items():
        assert torch.equal(x, expected[key]), key
    losses += train(resumed, 2)
    whole = built(run, "torch")
    assert losses == pytest.approx(train(whole, 4), rel=1e-5)
    assert furthest(held(resumed), held(whole)) < 1e-4  # what four steps make of rounding
    assert losses[-1] < losses[0]
    if first == then:  # one run, as if nothing had been between
        train(saved, 2)
        assert all(torch.equal(x, held(saved)[key]) for key, x in held(resumed).items())


def test_one_pass_for_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: matrices stepped by torch as well, or left to the reference."""
    state, rows = built("ngpt", "triton"), []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *_, **__: pytest.fail("not on Triton"))
    real = row_adam.adam_rows_
    monkeypatch.setattr(row_adam, "adam_rows_", lambda *a, **k: (rows.append(a[0]), real(*a, **k)))
    moved = []
    fused = torch._fused_adam_
    monkeypatch.setattr(torch, "_fused_adam_", lambda *a, **k: (moved.extend(a[0]), fused(*a, **k)))
    train(state, 1)
    assert sorted(map(id, rows)) == sorted(id(x) for x in state.model.parameters() if x.ndim == 2)
    assert sorted(map(id, moved)) == sorted(id(x) for x in state.model.parameters() if x.ndim < 2)
