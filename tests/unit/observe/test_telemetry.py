"""Telemetry against brute force in fp64, and that it changes nothing of the training it observes."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.models import Decoder, build_model, export_weights, load_weights
from ngpt_train.models.angpt.model import AnGPTAttention
from ngpt_train.models.weights import export_gradients
from ngpt_train.observe.telemetry.collector import Telemetry
from ngpt_train.training import build_state, train_step
from ngpt_train.training.state import TrainState
from ngpt_train.training.step import NOBODY, MicroBatch
from tests.properties.architectures import ARCHITECTURES, Size
from tests.properties.runs import held, infinite_loss, padded_rows, run_config, text_like_rows
from tests.reference import telemetry as reference
from tests.reference.training import Recipe
from tests.reference.varlen import varlen

ROWS, T = 4, 16
SIZE = Size(d_model=32, n_layers=2, n_heads=4, vocab_size=40, n_kv_heads=2, d_mlp=48, source_context=6)
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.05, warmup_steps=0)
NAMES = [name for name in ARCHITECTURES if "+" not in name]
# Sums of fp32 numbers are in fp64; the difference of two weights has one rounding of fp32.
ROUNDING = 4 * 2**-23


def state_of(name: str, *options: str, lr: float = RECIPE.lr) -> TrainState:
    recipe, sizes = replace(RECIPE, lr=lr), {"rows": ROWS, "context": T, "micro_rows": ROWS // 2}
    return build_state(run_config(name, SIZE, recipe, **sizes, parallel="single", options=options))


def batch(name: str, step: int) -> list[MicroBatch]:
    """Two micro batches; in every other step of a decoder with documents and padding."""
    if ARCHITECTURES[name].has_encoder:
        parts: Sequence[Tensor] = padded_rows(ROWS, T, SIZE, step)
    else:
        tokens, targets = text_like_rows(ROWS, T, SIZE.vocab_size, step)
        doc_ids = (torch.arange(T) > 5).long().repeat(ROWS, 1)
        doc_ids[0, 12:], targets[0, 12:] = -1, -100
        parts = (tokens, targets, doc_ids) if step % 2 else (tokens, targets)
    return list(zip(*(part.split(ROWS // 2) for part in parts), strict=True))


class Witness(Telemetry):
    """Telemetry that also keeps what it was shown."""

    grad_norm: float

    def before_step(self, state: TrainState, micro_batches: Sequence[MicroBatch]) -> None:
        self.weights = export_weights(state.model)
        super().before_step(state, micro_batches)

    def before_update(self, state: TrainState) -> None:
        self.gradients = export_gradients(state.model)
        super().before_update(state)


def seen(state: TrainState, name: str, step: int = 0) -> tuple[Witness, dict[str, Any]]:
    """Takes a step that is observed: what was shown, and the record."""
    witness = Witness(state)
    witness.grad_norm = float(train_step(state, batch(name, step), observer=witness).grad_norm)
    (record,) = witness.records()
    return witness, record


def observed(name: str, steps: int, *options: str) -> tuple[TrainState, Witness, dict[str, Any]]:
    """The state after `steps`, of which the last is observed, and its record."""
    state = state_of(name, *options)
    for step in range(steps - 1):
        train_step(state, batch(name, step))
    return (state, *seen(state, name, steps - 1))


def chosen(record: dict[str, Any], *statistics: str) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.split("/")[0] in statistics}


def same(actual: dict[str, float], expected: dict[str, float], rel: float) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=rel, abs=1e-12, nan_ok=True), key


ATTENTION = ("attention_max_logit", "attention_saturated")
CHANGES = ("grad_l1", "grad_l2", "weight_l2", "update_ratio", "angle_mean", "angle_max")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_weights_and_updates(name: str) -> None:
    """Caught: fused matrices as one, a square or a root too many, gradients that are clipped or of a micro batch,
    weights of before the step, a layer that lacks a weight, a model without angles, or with those of vectors."""
    state, witness, record = observed(name, 3)
    after = export_weights(state.model)
    expected = reference.changes(witness.weights, after, witness.gradients)
    same(chosen(record, *CHANGES), expected, ROUNDING)
    assert {"grad_l2/layers.0.wq", "grad_l2/layers.1", "grad_l2/embedding"} <= record.keys()
    assert record["kind"] == "telemetry"
    assert (record["step"], record["tokens"]) == (3, int(state.tokens))


@pytest.mark.parametrize("optimizer", ["muon", "adamh"])
def test_angles_with_a_matrix_optimizer(optimizer: str) -> None:
    state, witness, record = observed("gpt", 3, f"optim.name={optimizer}")
    expected = reference.changes(witness.weights, export_weights(state.model), witness.gradients)
    same(chosen(record, *CHANGES), expected, ROUNDING)
    assert record["angle_mean/layers.0.wo"] > 0


@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_gradients_are_those_of_autograd_in_fp64(name: str) -> None:
    """Of the whole step: the mean over the targets of both micro batches, before clipping."""
    _, witness, record = observed(name, 2)
    model = build_model(state_of(name).config.model).double()
    load_weights(model, witness.weights)
    total, n = torch.zeros(()), 0
    for micro_batch in batch(name, 1):
        loss, n_tokens = model.loss(*micro_batch)
        total, n = total + loss, n + int(n_tokens)
    (total / n).backward()
    expected = reference.changes(witness.weights, witness.weights, export_gradients(model))
    assert math.sqrt(sum(record[f"grad_l2/{key}"] ** 2 for key in witness.weights)) > RECIPE.clip_norm
    # fp32 against fp64: a small gradient is a sum of terms that cancel, so that norms agree to fewer digits.
    for key in [key for key in expected if key.startswith("grad")]:
        assert record[key] == pytest.approx(expected[key], rel=1e-3), key


def test_gradients_in_fp16_are_without_the_loss_scale() -> None:
    """Caught: gradients times the loss scale."""
    state, witness, record = observed("gpt", 2, "train.precision=fp16")
    assert state.loss_scale is not None
    scale = float(state.loss_scale.value)
    assert scale > 1
    for name, gradient in witness.gradients.items():
        assert record[f"grad_l1/{name}"] == pytest.approx(float(gradient.double().abs().sum()) / scale, rel=1e-6)
    total = math.sqrt(sum(record[f"grad_l2/{name}"] ** 2 for name in witness.weights))
    assert total == pytest.approx(witness.grad_norm, rel=1e-6)


@pytest.mark.parametrize(
    ("constraint", "lr", "rel"),
    [("parametrization", RECIPE.lr, 1e-6), ("none", RECIPE.lr, 1e-6), ("parametrization", 1e-6, 1e-3)],
)
def test_angles_without_the_projection(constraint: str, lr: float, rel: float) -> None:
    """Rows of any length turn as their directions do. Caught: rows taken for unit; an angle by arccos, which of fp32
    knows none below 3e-4."""
    state = state_of("ngpt", f"model.constraint={constraint}", lr=lr)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.mul_(torch.rand(len(parameter), *[1] * (parameter.ndim - 1)) + 0.5)
    witness, record = seen(state, "ngpt")
    expected = reference.changes(witness.weights, export_weights(state.model), witness.gradients)
    same(chosen(record, "angle_mean", "angle_max"), {k: v for k, v in expected.items() if "angle" in k}, rel)
    assert (record["angle_max/layers.0.wq"] < 1e-4) == (lr == 1e-6)


@pytest.mark.parametrize("options", [[], ["model.alpha_sign=free"], ["model.alpha_attn.kind=scalar"]])
def test_effective_scales(options: list[str]) -> None:
    """stored * init / scale, with |alpha|. Caught: the stored values, a sign that is lost or kept."""
    state = state_of("ngpt", *options)
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if parameter.ndim == 1:
                parameter.mul_(torch.linspace(-1, 2, len(parameter)) if len(parameter) > 1 else -1.0)
                assert name.endswith("stored")
    _, record = seen(state, "ngpt")
    expected = {}
    inits = {"alpha_attn": 0.05, "alpha_mlp": 0.05, "s_qk": 1.0, "s_u": 1.0, "s_v": 1.0, "s_z": 1.0}
    for name, stored in export_weights(state.model).items():
        kind = name.split(".")[-1]
        if kind in inits:
            scale = 1.0 if kind in ("s_u", "s_v") else 1 / math.sqrt(SIZE.d_model)
            value = stored.double() * inits[kind] / scale
            if "alpha" in kind and options != ["model.alpha_sign=free"]:
                value = value.abs()
            expected |= {f"value_min/{name}": float(value.min()), f"value_max/{name}": float(value.max())}
            expected[f"value_mean/{name}"] = float(value.mean())
    found = chosen(record, "value_min", "value_mean", "value_max")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


def test_gains_of_normformer() -> None:
    """Norms, head scale and lambda; biases are no gains."""
    state, _, record = observed("normformer", 3, "model.res_scale=true")
    weights = export_weights(state.model)
    gains = [name for name in weights if weights[name].ndim == 1 and ".b" not in name]
    assert {"layers.0.res_scale", "layers.1.head_scale", "layers.0.norm_ffn", "norm_final"} <= set(gains)
    expected = {}
    for name in gains:
        value = weights[name].double()
        expected |= {f"value_{word}/{name}": float(getattr(value, word)()) for word in ("min", "mean", "max")}
    same(chosen(record, "value_min", "value_mean", "value_max"), expected, 1e-12)


def sharpened(state: TrainState) -> None:
    """Weights with which attention saturates in some rows."""
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if name.endswith("wqkv.matrix"):
                parameter[: 3 * len(parameter) // 4] *= 1 if ARCHITECTURES[state.config.model.name].on_sphere else 4
            elif name.endswith("s_qk.stored"):
                parameter *= 2.5
    for module in state.model.modules():
        if isinstance(module, AnGPTAttention):  # whose q and k have length 1
            module.softmax_scale *= 6


def brute_force_scores(model: Decoder, micro_batch: MicroBatch, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """By what torch's attention is given in an fp64 copy of the model, in the order of the calls."""
    places = [f"encoder.{i}" for i in range(len(getattr(model, "encoder", [])))]
    for i in range(SIZE.n_layers):
        places += [f"layers.{i}", f"layers.{i}.cross"] if hasattr(model, "encoder") else [f"layers.{i}"]
    found: dict[str, float] = {}
    row = [part[:1] for part in micro_batch]
    kept = row[2][0] >= 0 if len(row) > 2 else torch.ones(T, dtype=torch.bool)
    attend = F.scaled_dot_product_attention

    def look(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float, enable_gqa: bool
    ) -> Tensor:
        place = places[len(found) // 2]
        n, s = q.shape[2], k.shape[2]
        seen = torch.ones(n, s, dtype=torch.bool)
        if is_causal:
            seen = seen.tril()
        if attn_mask is not None:
            seen = attn_mask[0, 0].expand(n, s).clone()
        seen[~(kept[:n] if place.startswith("encoder") else kept[-n:])] = False  # padding asks for nothing
        keys = k[0].repeat_interleave(q.shape[1] // k.shape[1], dim=0)
        largest, saturated, rows = reference.attention(q[0], keys, scale, seen)
        found[f"attention_max_logit/{place}"] = largest
        found[f"attention_saturated/{place}"] = saturated / rows
        return attend(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    again = copy.deepcopy(model).double().eval()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", look)
        again(*row)
    return found


@pytest.mark.parametrize("chunk", [2**24, 100])
@pytest.mark.parametrize("name", NAMES)
def test_attention(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, of documents, with padding, to an encoder. Caught: keys that are not seen, a scale that is left out,
    padding that counts, rows of one key, heads that share keys in another order, layers that change places."""
    monkeypatch.setattr("ngpt_train.observe.telemetry.scores.MOST_SCORES", chunk)
    for step in (0, 1):
        state = state_of(name)
        sharpened(state)
        expected = brute_force_scores(state.model, batch(name, step)[0], monkeypatch)
        _, record = seen(state, name, step)
        same(chosen(record, *ATTENTION), expected, 1e-4)
        shares = [value for key, value in expected.items() if "saturated" in key]
        assert all(0 < share < 1 for share in shares)


@pytest.mark.parametrize("norm", ["pn", "pn_v", "batch"])
def test_running_statistics(norm: str) -> None:
    """By hooks that see what enters the norms. Caught: the running psi after the batch, psi^2 for psi, the last micro
    batch alone, a pass for attention that counts."""
    options = [f"model.norm={norm}", "model.alpha_fwd=0.7"]
    options += ["model.psi_warmup_steps=1", "model.alpha_bkw=0.6"] if norm == "pn" else []
    state = state_of("powernorm", *options)
    for step in range(3):
        train_step(state, batch("powernorm", step))
    norms = {place: module for place, module in state.model.named_modules() if hasattr(module, "on_batch")}
    distances: dict[str, list[float]] = {}

    def hook(place: str) -> Callable[..., None]:
        def look(module: Any, arguments: Any) -> None:
            x, valid = arguments[0].detach().double(), arguments[1]
            if not module.training:
                return
            x = module.group_scaled(x)
            x = x[valid] if valid is not None else x.flatten(0, 1)
            mu = x.mean(0) if norm == "batch" else torch.zeros(x.shape[-1])
            pairs = {"psi": (x.square().mean(0), getattr(module, "psi_squared", None))}
            if norm == "batch":
                distances.setdefault(f"mu_distance/{place}", []).append(float((mu - module.mu).norm()))
                pairs = {"sigma": ((x - mu).square().mean(0), module.variance)}
            for symbol, (of_batch, running) in pairs.items():
                assert running is not None
                distance = ((of_batch + module.eps).sqrt() - (running.double() + module.eps).sqrt()).norm()
                distances.setdefault(f"{symbol}_distance/{place}", []).append(float(distance))

        return look

    for place, module in norms.items():
        module.register_forward_pre_hook(hook(place))
    _, record = seen(state, "powernorm", 3)
    assert {len(values) for values in distances.values()} == {2}
    expected = {key: sum(values) / 2 for key, values in distances.items()}
    same({k: v for k, v in record.items() if "_distance/" in k}, expected, 1e-4)
    for place, module in norms.items():
        if norm == "pn":
            assert record[f"nu_l2/{place}"] == pytest.approx(float(module.nu.double().norm()), rel=1e-6)
            assert record[f"nu_l2/{place}"] > 0
        if norm != "batch":
            psi = float((module.psi_squared + module.eps).sqrt().norm())
            assert record[f"psi_l2/{place}"] == pytest.approx(psi, rel=1e-6)
    assert all(module.on_batch is None for module in norms.values())


def test_attention_where_a_varlen_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, as on GPUs, takes documents laid end to end; telemetry sees them as a mask. Caught: a mask without
    booleans, a kernel with room for fewer documents than one row may have."""
    plain, packed = state_of("gpt"), state_of("gpt")
    sharpened(plain)
    sharpened(packed)
    expected = Telemetry(plain)
    train_step(plain, batch("gpt", 1), observer=expected)
    telemetry, shapes = Telemetry(packed), []

    def kernel(q: Tensor, *others: Any) -> Tensor:
        shapes.append(len(q))
        return varlen(q, *others)

    monkeypatch.setattr("ngpt_train.kernels.attention.find_varlen", lambda *_: (kernel, "a kernel", "a test"))
    train_step(packed, batch("gpt", 1), observer=telemetry)
    assert shapes == [ROWS // 2 * T] * 2 * SIZE.n_layers, "the training alone, both micro batches"
    same(chosen(telemetry.records()[0], *ATTENTION), chosen(expected.records()[0], *ATTENTION), 1e-5)


DROPOUT = [f"model.{kind}_dropout=0.3" for kind in ("embedding", "residual", "attention")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "options"), [*((name, []) for name in NAMES), ("gpt", DROPOUT)])
def test_training_is_the_same_bit_for_bit(name: str, options: list[str]) -> None:
    """Caught: a pass in training mode, which moves running statistics, and whatever else it leaves behind."""
    with_it, without = state_of(name, *options), state_of(name, *options)
    telemetry = Telemetry(with_it)
    for step in range(4):
        observer = telemetry if step % 2 else NOBODY
        one = train_step(with_it, batch(name, step), observer=observer)
        other = train_step(without, batch(name, step))
        assert (float(one.loss), float(one.grad_norm)) == (float(other.loss), float(other.grad_norm))
    assert with_it.model.training
    kept, expected = held(with_it), held(without)
    assert all(torch.equal(kept[key], x) for key, x in expected.items())
    for key, value in without.model.statistics().items():
        assert torch.equal(with_it.model.statistics()[key], value)
    assert [record["step"] for record in telemetry.records()] == [2, 4]
    assert telemetry.records() == []


@pytest.mark.parametrize("name", ["gpt", "ngpt", "powernorm"])
def test_a_skipped_step_moves_nothing(name: str) -> None:
    """The gradient is not finite and says so; the update is 0, bit for bit."""
    state = state_of(name)
    train_step(state, batch(name, 0))
    before = export_weights(state.model)
    with infinite_loss(state):
        witness, record = seen(state, name, 1)
    assert not math.isfinite(witness.grad_norm)
    assert not math.isfinite(record["grad_l2/layers.0.wq"])
    assert record["weight_l2/layers.0.wq"] == pytest.approx(float(before["layers.0.wq"].double().norm()), rel=1e-12)
    still = [value for key, value in record.items() if key.startswith(("update_ratio", "angle"))]
    assert set(still) <= {0.0} or all(value == 0 or math.isnan(value) for value in still)
    assert record["update_ratio/layers.0.wq"] == 0
    assert math.isfinite(record["attention_max_logit/layers.0"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt", "ngpt", "powernorm"])
def test_compiled_blocks_are_not_compiled_again(name: str) -> None:
    """Caught: a pass that compiles, guards that the telemetry breaks."""
    state, plain = (state_of(name, "train.compile=true") for _ in range(2))
    telemetry = Telemetry(state)
    eager = Telemetry(eager_state := state_of(name))
    compiles = torch._dynamo.utils.counters["stats"]
    train_step(state, batch(name, 1), observer=telemetry)
    train_step(eager_state, batch(name, 1), observer=eager)
    before = compiles["unique_graphs"]
    losses = [float(train_step(state, batch(name, 1), observer=telemetry).loss) for _ in range(2)]
    assert compiles["unique_graphs"] == before > 0
    train_step(plain, batch(name, 1))
    assert losses == [float(train_step(plain, batch(name, 1)).loss) for _ in range(2)]
    first, expected = telemetry.records()[0], eager.records()[0]
    assert first.keys() == expected.keys()
    for key in [key for key in expected if key.startswith("attention")]:
        assert first[key] == pytest.approx(expected[key], rel=1e-5)


OPTIONS = {
    "gpt": ["qk_norm=true", "tied_embeddings=true"],
    "ngpt": ["update=slerp", "alpha_attn.kind=fixed", "s_qk.kind=scalar", "constraint=parametrization"],
    "normformer": ["res_scale=true", "qkv_norm=true", "positions=learned", "tied_embeddings=false"],
    "ntransformer": ["tied_embeddings=true", "s_z.kind=scalar"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_models_have_numbers(name: str) -> None:
    """Every number is finite, but for updates of biases that start at 0; every weight has its numbers."""
    state = state_of(name, *(f"model.{option}" for option in OPTIONS[name]))
    before = export_weights(state.model)
    _, record = seen(state, name)
    undefined = {key for key, value in record.items() if key != "kind" and not math.isfinite(value)}
    assert undefined == {f"update_ratio/{key}" for key, weight in before.items() if not weight.any()}
    assert all(f"grad_l1/{key}" in record for key in before)
    if name == "ngpt":
        alpha = [record[f"value_{word}/layers.0.alpha_attn"] for word in ("min", "mean", "max")]
        assert alpha == pytest.approx([0.05] * 3), "fixed, and yet in use"
