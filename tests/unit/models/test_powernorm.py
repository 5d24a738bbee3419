"""Norms over the batch: by their reference, and what compile, recomputation, padding and resumes must not change."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.evaluation.validation import Validation
from ngpt_train.models import Decoder, build_model, export_gradients, export_weights, load_weights
from ngpt_train.models.powernorm.keys import PowerNormConfig
from ngpt_train.models.powernorm.model import BatchNorm, NormOverBatch, PowerNorm, PowerNormV
from ngpt_train.training import build_state, train_step
from ngpt_train.training.checkpoint import load_state
from ngpt_train.training.state import TrainState
from tests.processes.runs import arguments, numbers, records, write_corpus
from tests.processes.test_statistics import Rows as FiveRows
from tests.properties.architectures import SMALL, Size, config, jittered, powernorm_with
from tests.properties.runs import run_config, text_like_rows
from tests.reference import composed
from tests.reference import powernorm as reference
from tests.reference.attention import loss_sum
from tests.reference.training import Recipe

SIZE = Size(d_model=16, n_layers=2, n_heads=4, vocab_size=23, n_kv_heads=2, d_mlp=24)
ROWS, T, PAD = 3, 10, 22  # PAD stands in padding alone
OPTIONS = {"alpha_fwd": 0.8, "alpha_bkw": 0.93, "norm_eps": 1e-4}
WARMUP = 2  # steps, of the runs through train_step
RECIPE = Recipe(8, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=WARMUP)
over_the_batch = pytest.mark.parametrize("norm", ["pn", "pn_v", "batch"])
# Only PowerNorm has a warm-up.
kinds = pytest.mark.parametrize(
    ("warming_up", "kind"), [(False, PowerNorm), (True, PowerNorm), (False, PowerNormV), (False, BatchNorm)]
)

Rows = tuple[Tensor, Tensor, Tensor | None]


@pytest.fixture(scope="module", autouse=True)
def no_process_group_afterwards() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def padded_batch(seed: int) -> Rows:
    """Two documents a row. All rows but the first end in padding; without document ids every third time."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(PAD, (ROWS, T), generator=generator) for _ in range(2))
    targets[torch.rand(ROWS, T, generator=generator) < 0.2] = -100
    if seed % 3 == 2:
        return tokens, targets, None
    doc_ids = (torch.arange(T) >= torch.randint(2, T, (ROWS, 1), generator=generator)).long()
    for row in range(1, ROWS):
        end = int(torch.randint(4, T, (1,), generator=generator))
        doc_ids[row, end:], targets[row, end:], tokens[row, end:] = -1, -100, PAD
    return tokens, targets, doc_ids


def gradients(model: Decoder) -> dict[str, Tensor]:
    found = export_gradients(model)
    assert found.keys() == export_weights(model).keys()
    return found


def statistics(model: Decoder) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.statistics().items()}


def restore(model: Decoder, kept: dict[str, Tensor]) -> None:
    for name, value in model.statistics().items():
        value.copy_(kept[name])


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Each tensor to `rtol` of its largest entry; 0: bit for bit."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].shape == x.shape, name
        assert (actual[name] - x).abs().max() <= rtol * x.abs().max(), name


def backward(model: Decoder, rows: Rows, scale: float = 1.0) -> float:
    loss, _ = model.loss(*rows)
    (loss * scale).backward()
    return loss.item()


class ByReference:
    """The same decoder by tests/reference: weights, gradients and statistics under the model's names."""

    def __init__(self, config: PowerNormConfig, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, {name: x.clone().requires_grad_() for name, x in weights.items()}
        self.places = reference.places(config.n_layers)
        kinds: dict[str, Any] = {
            "pn": partial(reference.PN, alpha_bkw=config.alpha_bkw),
            "pn_v": reference.PNV,
            "batch": reference.BatchNorm,
        }
        options = {"alpha_fwd": config.alpha_fwd, "eps": config.norm_eps}
        self.norms = {} if config.norm == "layer" else {p: kinds[config.norm](16, **options) for p in self.places}
        self.common: dict[str, Any] = {"groups": config.group_scaling, "eps": config.norm_eps}

    def loss(self, rows: Rows, *, training: bool, warmup: bool = False, scale: float = 1.0) -> Tensor:
        tokens, targets, doc_ids = rows
        if not self.norms:
            norms = reference.with_layer_norm(self.places, **self.common)
        elif training:
            valid = None if doc_ids is None else doc_ids >= 0
            norms = reference.in_training(self.norms, valid=valid, warmup=warmup, loss_scale=scale, **self.common)
        else:
            norms = reference.in_evaluation(self.norms, **self.common)
        return loss_sum(composed.forward(self.weights, tokens, norms=norms, n_heads=4, doc_ids=doc_ids), targets)

    def gradients(self) -> dict[str, Tensor]:
        return {name: x.grad for name, x in self.weights.items() if x.grad is not None}

    def statistics(self) -> dict[str, Tensor]:
        found = {}
        for place, norm in self.norms.items():
            if isinstance(norm, reference.BatchNorm):
                found |= {f"{place}.mu": norm.mean, f"{place}.variance": norm.variance}
                continue
            found[f"{place}.psi_squared"] = norm.psi2
            if isinstance(norm, reference.PN):
                found[f"{place}.nu"] = norm.nu
                found[f"{place}.n_warmup"] = torch.tensor(float(len(norm.warmup_psi2)))
        return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("norm", "warmup", "groups"),
    [
        ("pn", 0, 0),
        ("pn", 10, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("pn_v", 0, 2), ("batch", 0, 0), ("layer", 0, 2)]),
        pytest.param("pn", 0, 1, marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_by_the_reference(norm: str, warmup: int, groups: int) -> None:
    """Caught: alpha_fwd and alpha_bkw exchanged, nu or 1 - gamma left out, groups of every fourth channel, LayerNorm
    without its layer-scale."""
    architecture = powernorm_with(norm=norm, psi_warmup_steps=warmup, group_scaling=groups, **OPTIONS)
    model, weights = jittered(architecture, SIZE)
    for name, x in weights.items():
        if name.startswith("layers") and x.ndim == 2:
            x *= 0.3  # else PowerNorm's gradients, which are not the derivatives of its loss, grow without bound
    load_weights(model, weights)
    expected = ByReference(model.config, weights)  # type: ignore[arg-type]
    for step in range(50):
        scale = (1.0, 0.02, 3.0, 0.5)[step % 4]
        model.begin_step_(step, torch.tensor(scale, dtype=torch.float64))
        for seed in (2 * step, 2 * step + 1):
            rows = padded_batch(seed)
            loss = backward(model, rows, scale)
            other = expected.loss(rows, training=True, warmup=step < warmup, scale=scale)
            (other * scale).backward()
            assert loss == pytest.approx(other.item(), rel=1e-10)
        assert_near(gradients(model), expected.gradients(), 1e-10)
        assert_near(model.statistics(), expected.statistics(), 1e-10)
        with torch.no_grad():
            for x in (*model.parameters(), *expected.weights.values()):
                x -= 1e-3 / scale * x.grad
                x.grad = None
    kept = statistics(model)
    model.eval()
    for seed in range(3):
        rows = padded_batch(seed)
        loss = backward(model, rows)
        assert loss == pytest.approx(expected.loss(rows, training=False).item(), rel=1e-10)
    assert_near(model.statistics(), kept, 0)


@pytest.mark.parametrize("norm", ["pn", "pn_v", "batch", "layer"])
def test_every_norm_gets_its_alphas_and_its_layer_scale(norm: str) -> None:
    """From the keys, the last norm too. Caught: a norm without the layer-scale, one alpha for both."""
    alphas = {"alpha_fwd": 0.95, "alpha_bkw": 0.99}
    model = build_model(config(powernorm_with(norm=norm, group_scaling=1, **alphas), SIZE))
    norms = [module for module in model.modules() if isinstance(module, NormOverBatch)]
    assert len(norms) == 2 * SIZE.n_layers + 1
    for each in norms:
        assert (each.alpha_fwd, each.alpha_bkw) == (0.95, 0.99)
        scaled = each.group_scaled(noise(3, 1, 4, SIZE.d_model)).square().mean(-1)
        torch.testing.assert_close(scaled, torch.ones_like(scaled), rtol=1e-3, atol=0)


# One norm by itself.


def layer_of(kind: type[NormOverBatch], size: int = 6, **options: Any) -> Any:
    layer = kind(size, PowerNormConfig(**{"group_scaling": 0} | OPTIONS | options)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (layer.gain, layer.bias):
            parameter.copy_(torch.rand(size, generator=generator) + 0.5)
    return layer


def one_pass(
    layer: Any, x: Tensor, dy: Tensor, valid: Tensor | None = None, scale: float = 1.0, warming_up: bool = False
) -> dict[str, Tensor]:
    """Forward, backward and statistics for x and dL/dy (B, T, C); y and the gradients."""
    x = x.clone().requires_grad_()
    running = layer.running_statistics(warming_up, scale)
    y, batch = layer(x, valid, running)
    layer.update_(running, batch, scale)
    layer.zero_grad()
    (y * dy * scale).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, "gain": layer.gain.grad, "bias": layer.bias.grad}


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("padded", [False, True])
def test_on_a_frozen_batch_the_gradient_becomes_exact(padded: bool) -> None:
    """Caught: nu or 1 - gamma left out."""
    x, dy = 3 * noise(0, 4, 7, 6), noise(1, 4, 7, 6) + 0.3
    valid = None
    if padded:
        valid = torch.arange(7) < torch.tensor([7, 5, 6, 2]).unsqueeze(1)
        dy *= valid.unsqueeze(-1)
    exact = one_pass(layer_of(PowerNormV, norm_eps=1e-20), x, dy, valid)
    layer = layer_of(PowerNorm, norm_eps=1e-20)
    first = one_pass(layer, x, dy, valid)
    for _ in range(600):
        last = one_pass(layer, x, dy, valid)
    assert (first["x"] - exact["x"]).abs().max() > 0.1 * exact["x"].abs().max()
    assert_near(last, exact, 1e-12)


@kinds
def test_padding_is_alone(kind: type[NormOverBatch], warming_up: bool) -> None:
    """No gradient comes to it, and what stands there does not matter. Caught: padding in the mean."""
    valid = torch.arange(7) < torch.tensor([7, 5, 6, 2]).unsqueeze(1)
    inside = valid.unsqueeze(-1)
    layer, other = layer_of(kind), layer_of(kind)
    for step in range(3):  # after the first nu is not zero
        x, dy = noise(step, 4, 7, 6), noise(step + 10, 4, 7, 6) * inside
        found = one_pass(layer, x, dy, valid, warming_up=warming_up)
        elsewhere = one_pass(other, torch.where(inside, x, 1e3), dy, valid, warming_up=warming_up)
        assert not found["x"][~valid].any()
        assert found["x"][valid].all()
        for results in (found, elsewhere):
            results["y"] = results["y"] * inside
        assert_near(elsewhere, found, 0)
        assert_near(other.statistics(), layer.statistics(), 0)


def test_nu_hears_nothing_from_padding() -> None:
    """Not even where a loss counts there. Caught: Lambda's sum without valid."""
    valid = torch.arange(7) < torch.tensor([7, 5, 6, 2]).unsqueeze(1)
    layer = layer_of(PowerNorm)
    one = reference.PN(6, alpha_fwd=layer.alpha_fwd, alpha_bkw=layer.alpha_bkw, eps=layer.eps)
    for step in range(3):
        x, dy = noise(step, 4, 7, 6), noise(step + 10, 4, 7, 6)
        found = one_pass(layer, x, dy, valid)
        one.forward(x.flatten(0, 1), layer.gain.detach(), layer.bias.detach(), valid.flatten())
        dx, *_ = one.backward(dy.flatten(0, 1))
        assert_near({"dx": found["x"].flatten(0, 1), "nu": layer.nu}, {"dx": dx, "nu": one.nu}, 1e-12)


@pytest.mark.parametrize(("warming_up", "first"), [(False, 0), (True, 1)])
def test_two_forward_passes_before_a_backward_pass(warming_up: bool, first: int) -> None:
    """Each corrects its gradient by the nu that its forward pass saw; nu itself takes one step after the other.

    Caught: nu read in the backward pass.
    """
    layer = layer_of(PowerNorm)
    one = reference.PN(6, alpha_fwd=layer.alpha_fwd, alpha_bkw=layer.alpha_bkw, eps=layer.eps)
    gain, bias = layer.gain.detach(), layer.bias.detach()
    x, dy = noise(0, 2, 5, 6), noise(1, 2, 5, 6)
    one_pass(layer, x, dy)
    one.forward(x.flatten(0, 1), gain, bias)
    one.backward(dy.flatten(0, 1))

    seen = copy.deepcopy(one)  # with nu as in the forward passes
    passes = []
    for seed in (2, 3):
        x = noise(seed, 2, 5, 6).requires_grad_()
        running = layer.running_statistics(warming_up, 1.0)
        y, batch = layer(x, None, running)
        layer.update_(running, batch, 1.0)
        expected = one.forward(x.detach().flatten(0, 1), gain, bias, warmup=warming_up)
        assert_near({"y": y.flatten(0, 1)}, {"y": expected}, 1e-12)
        passes.append((x, y, noise(seed + 10, 2, 5, 6), one.saved))
    for x, y, dy, saved in (passes[first], passes[1 - first]):
        y.backward(dy)
        dx, *_ = copy.deepcopy(seen).backward(dy.flatten(0, 1), saved=saved)
        one.backward(dy.flatten(0, 1), saved=saved)
        assert x.grad is not None
        found = {"dx": x.grad.flatten(0, 1), "nu": layer.nu, "psi2": layer.psi_squared}
        assert_near(found, {"dx": dx, "nu": one.nu, "psi2": one.psi2}, 1e-12)


# Runs through train_step.


def powernorm_state(norm: str = "pn", parallel: str = "single", **train: Any) -> TrainState:
    """Two micro batches a step; the first WARMUP steps are pn's warm-up."""
    found = run_config("powernorm", SMALL, RECIPE, rows=4, context=16, micro_rows=2, parallel=parallel)
    model = replace(found.model, norm=norm, **OPTIONS)
    state = build_state(replace(found, model=model, train=replace(found.train, **train)))
    assert any(isinstance(p, DTensor) for p in state.model.parameters()) == (parallel == "fsdp")
    return state


def micro_batches(seed: int) -> list[tuple[Tensor, ...]]:
    tokens, targets = text_like_rows(4, 16, SMALL.vocab_size, seed)
    doc_ids = (torch.arange(16) > 7).long().repeat(4, 1)
    doc_ids[1, 11:], targets[1, 11:] = -1, -100
    return list(zip(tokens.chunk(2), targets.chunk(2), doc_ids.chunk(2), strict=True))


def history(state: TrainState, steps: int = 2 * WARMUP) -> list[dict[str, Tensor]]:
    """Loss, gradients' norm, statistics and weights after each step."""
    found = []
    for step in range(steps):
        result = train_step(state, micro_batches(step))
        numbers = {"loss": result.loss, "grad_norm": result.grad_norm}
        found.append(numbers | statistics(state.model) | export_weights(state.model))
    return found


def test_the_warm_up_counts_optimizer_steps() -> None:
    """Caught: a warm-up one step too long."""
    for number, found in enumerate(history(powernorm_state(), WARMUP + 2)):
        passes = {value.item() for name, value in found.items() if name.endswith("n_warmup")}
        assert passes == {2 * min(number + 1, WARMUP)}


def test_validation_is_by_the_running_statistics() -> None:
    """Caught: validation in training mode."""
    state = powernorm_state()
    kept = history(state)[-1]
    validation = Validation(FiveRows(), np.full(SMALL.vocab_size, 2), np.arange(5))
    found = validation.row_losses(state.model, state.world).metrics()["loss"]
    assert state.model.training
    assert_near(state.model.statistics(), {name: kept[name] for name in state.model.statistics()}, 0)
    state.model.eval()
    loss, n_tokens = state.model.loss(*map(torch.from_numpy, FiveRows().batch(np.arange(5))))
    assert found == pytest.approx(loss.item() / int(n_tokens), rel=1e-6)


def test_recomputation_changes_nothing() -> None:
    """As pn in tests/properties/test_recomputation.py. Caught: statistics that a forward pass advances by itself."""
    plain, again = (history(powernorm_state("batch", activation_checkpointing=kind)) for kind in ("none", "full"))
    for one, other in zip(plain, again, strict=True):
        assert_near(other, one, 0)


@pytest.mark.exhaustive
@over_the_batch
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_compile_changes_nothing(norm: str, recomputed: str) -> None:
    """Caught: statistics that a compiled block advances by itself."""
    torch.compiler.reset()
    state = powernorm_state(norm)
    plain = history(state)
    compiled = history(powernorm_state(norm, compile=True, activation_checkpointing=recomputed))
    for one, other in zip(plain, compiled, strict=True):
        assert other["loss"].item() == pytest.approx(one["loss"].item(), rel=1e-6)
        assert other["grad_norm"].item() == pytest.approx(one["grad_norm"].item(), rel=1e-5)
        # Weights apart: where a gradient is all rounding, Adam makes it as large as any.
        names = state.model.statistics()
        assert_near({key: other[key] for key in names}, {key: one[key] for key in names}, 1e-4)


@pytest.mark.parametrize("kind", [PowerNorm, PowerNormV, BatchNorm])
def test_statistics_of_bf16_are_taken_in_fp32(kind: type[NormOverBatch]) -> None:
    """Caught: a mean over bf16, running statistics advanced by rounded ones."""
    layer, expected = layer_of(kind, group_scaling=2).float(), layer_of(kind, group_scaling=2)
    for seed in range(3):
        x, dy = noise(seed, 4, 7, 6).bfloat16(), noise(seed + 10, 4, 7, 6).bfloat16()
        assert one_pass(layer, x, dy)["y"].dtype == torch.bfloat16
        one_pass(expected, x.double(), dy.double())
    assert_near(layer.statistics(), expected.statistics(), 1e-5)


@pytest.mark.parametrize(("norm", "parallel"), [("pn", "fsdp"), ("batch", "single")])
def test_statistics_stay_fp32(norm: str, parallel: str) -> None:
    """Caught: running statistics rounded to bf16."""
    state = powernorm_state(norm, parallel, precision="bf16")
    start = statistics(state.model)
    final = history(state)[-1]
    whole = history(powernorm_state(norm, precision="fp32"))[-1]
    for name, x in state.model.statistics().items():
        assert x.dtype == torch.float32
        assert x.shape == start[name].shape
        if not name.endswith("n_warmup"):
            assert not torch.equal(x, start[name])
            assert not torch.equal(x, x.bfloat16().float()), "rounded on the way"
            assert (final[name] - whole[name]).abs().max() < 0.2 * whole[name].abs().max()


@pytest.mark.parametrize(("norm", "step"), [("pn", 0), ("pn", WARMUP), ("batch", WARMUP)])
def test_a_bad_batch_is_forgotten(norm: str, step: int) -> None:
    """Caught: NaN in running statistics."""
    state = powernorm_state(norm)
    history(state, step)
    weights = export_weights(state.model)
    before = statistics(state.model)
    with torch.no_grad():
        row = state.model.embedding[7].clone()
        state.model.embedding[7] = torch.nan
    bad = micro_batches(50)
    for tokens, *_ in bad:
        tokens[:, 3] = 7
    assert train_step(state, bad).skipped
    for name, value in state.model.statistics().items():
        assert value.isfinite().all(), name
        if not name.endswith("n_warmup"):
            assert torch.equal(value, before[name]), name
    with torch.no_grad():
        state.model.embedding[7] = row
    assert_near(export_weights(state.model), weights, 0)
    result = train_step(state, micro_batches(51))
    assert not result.skipped
    assert result.loss.isfinite()


def test_a_bad_batch_is_no_part_of_the_mean_of_the_warm_up() -> None:
    """psi^2 is the mean over the warm-up's batches, none of them forgotten. Caught: a NaN batch counted."""
    layer = layer_of(PowerNorm)
    dy = torch.ones(2, 5, 6, dtype=torch.float64)
    one_pass(layer, torch.full_like(dy, torch.nan), dy, warming_up=True)
    x = 3 * noise(0, 2, 5, 6)
    one_pass(layer, x, dy, warming_up=True)
    assert_near({"psi2": layer.psi_squared}, {"psi2": x.square().mean((0, 1))}, 1e-12)


@kinds
def test_nothing_but_padding_is_no_batch(kind: type[NormOverBatch], warming_up: bool) -> None:
    """Caught: running statistics drawn towards the mean of nothing, which is 0."""
    layer = layer_of(kind)
    x, dy = 3 * noise(0, 2, 5, 6), noise(1, 2, 5, 6)
    one_pass(layer, x, dy, warming_up=warming_up)
    kept = {name: value.clone() for name, value in layer.statistics().items() if name != "nu"}
    one_pass(layer, x, torch.zeros_like(dy), torch.zeros(2, 5, dtype=torch.bool), warming_up=warming_up)
    assert_near({name: layer.statistics()[name] for name in kept}, kept, 0)


# Causality.


def moved_logits(model: Decoder, tokens: Tensor, t: int) -> Tensor:
    """True for the logits (B, T) that change with token t, from the same statistics."""
    changed = tokens.clone()
    changed[:, t] = (changed[:, t] + 1) % SIZE.vocab_size
    kept = statistics(model)
    results = []
    with torch.no_grad():
        for row in (tokens, changed):
            results.append(model(row))
            restore(model, kept)
    return (results[0] != results[1]).any(-1)


@pytest.mark.parametrize(
    ("norm", "step", "leaks"),
    [("pn", 2, True), ("pn", 3, False), ("pn_v", 3, True), ("batch", 3, True), ("layer", 0, False)],
)
def test_later_tokens_matter_where_the_note_says(norm: str, step: int, leaks: bool) -> None:
    """PowerNorm's warm-up cannot keep the contract. Caught: a warm-up one step too long."""
    model, _ = jittered(powernorm_with(norm=norm, psi_warmup_steps=3, **OPTIONS), SIZE)
    for seed in range(2):
        backward(model, padded_batch(seed))
    tokens, _, _ = padded_batch(7)
    model.begin_step_(step, torch.tensor(1.0))
    moved = moved_logits(model, tokens, 6)
    assert moved[:, 6:].all()
    assert moved[:, :6].all() if leaks else not moved[:, :6].any()
    model.eval()
    moved = moved_logits(model, tokens, 6)
    assert moved[:, 6:].all()
    assert not moved[:, :6].any()


@pytest.mark.parametrize(
    ("norm", "steps", "when"),
    [
        ("pn", 3, "in the first 3 steps"),
        ("pn", 0, None),
        ("pn_v", 0, "in training"),
        ("batch", 3, "in training"),
        ("layer", 3, None),
    ],
)
def test_notes(norm: str, steps: int, when: str | None) -> None:
    """Caught: no note, or a note of another time."""
    notes = build_model(config(powernorm_with(norm=norm, psi_warmup_steps=steps), SIZE)).notes()
    assert len(notes) == (when is not None)
    for note in notes:
        assert f"model.norm={norm} uses the statistics of the batch {when}, later tokens included" in note
        assert "Validation uses running statistics and is causal" in note


# Through the verbs.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


def powernorm_arguments(directory: Path, corpus: Path, *more: str) -> list[str]:
    options = ["model=powernorm", "model.psi_warmup_steps=6", "eval.every=3", "checkpoint.every=100"]
    return arguments(directory, corpus, *options, *more)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert main(["train", *powernorm_arguments(directory, corpus)]) == 0
    return directory / "runs/test"


def test_the_note_is_said_once(uninterrupted: Path) -> None:
    log = (uninterrupted / "logs/rank_0.log").read_text()
    assert log.count("model.norm=pn uses the statistics of the batch in the first 6 steps") == 1
    assert log.count("note: ") == 1


def test_weights_of_another_run_begin_a_warm_up_of_their_own(uninterrupted: Path, corpus: Path, tmp_path: Path) -> None:
    """On another schedule, too. Caught: passes of the other run's warm-up counted, init_from refused for its steps."""
    given = [f"run.init_from={uninterrupted}", "model.psi_warmup_steps=3", "model.alpha_fwd=0.8", "train.steps=8"]
    assert main(["train", *powernorm_arguments(tmp_path, corpus, *given, "train.stop_at=2")]) == 0
    state = build_state(load_config([*powernorm_arguments(tmp_path, corpus), "model.vocab_size=257"]))
    load_state(next((tmp_path / "runs/test/checkpoints").glob("step_*2")), state)
    passes = {value.item() for name, value in statistics(state.model).items() if name.endswith("n_warmup")}
    assert passes == {2 * 4}  # steps, micro batches


def test_resumes_bit_for_bit(uninterrupted: Path, corpus: Path, tmp_path: Path) -> None:
    """Stopped in the warm-up, and again behind its end. Caught: nu, or the passes of the warm-up, not saved."""
    for stop in (4, 8, 12):
        assert main(["train", *powernorm_arguments(tmp_path, corpus, f"train.stop_at={stop}")]) == 0
    directory = tmp_path / "runs/test"
    assert numbers(directory) == numbers(uninterrupted)
    expected = {step: record["loss"] for step, record in records(uninterrupted, "eval").items()}
    found = {step: record["loss"] for step, record in records(directory, "eval").items()}
    assert {0, 3, 6, 9, 12} <= found.keys()
    assert {step: found[step] for step in expected} == expected


def test_evaluate_gives_the_loss_of_training(uninterrupted: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = powernorm_arguments(tmp_path, corpus, f"evaluate.checkpoint={uninterrupted}", f"evaluate.out={out}")
    assert main(["evaluate", *given]) == 0
    trained = records(uninterrupted, "eval")
    assert json.loads(out.read_text())["loss"] == trained[12]["loss"]
    assert trained[12]["loss"] < 0.95 * trained[0]["loss"]
