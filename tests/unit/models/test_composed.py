"""The composed models: equal to the architectures that they can spell, and PowerNorm in every place.

Each placement and norm by its equation: test_models.py.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.models import Decoder, build_model, export_gradients, export_weights, load_weights
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.layers.linear import FusedLinear
from ngpt_train.models.layers.norms import Derf
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import (
    ARCHITECTURES,
    NORMFORMER,
    SMALL,
    VARIANTS,
    Architecture,
    Size,
    as_composed,
    composed_encoder_decoder_with,
    composed_with,
    config,
    documents,
    error,
    jittered,
    powernorm_with,
    random_batch,
    shapes,
    source_length,
)
from tests.properties.runs import rows_of, run_config
from tests.reference import composed as reference
from tests.reference import powernorm
from tests.reference.attention import loss_sum
from tests.reference.training import Recipe

GPT = {"norm_eps": 1e-6}
FLAGS = [f"normformer {flags}" for flags in ("none of them", "all, after", "learned", "no bias")]  # each at least once
EQUALS: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "gpt": (ARCHITECTURES["gpt"], GPT),
    "gpt+qk_norm": (ARCHITECTURES["gpt+qk_norm"], GPT | {"qk_norm": True}),
    "gpt gelu": (VARIANTS["gpt gelu"], GPT | {"activation": "gelu"}),
    "gpt_encoder_decoder": (ARCHITECTURES["gpt_encoder_decoder"], GPT),
    "gpt_encoder_decoder+qk_norm": (ARCHITECTURES["gpt_encoder_decoder+qk_norm"], GPT | {"qk_norm": True}),
    "normformer": (ARCHITECTURES["normformer"], NORMFORMER),
    **{name: (VARIANTS[name], as_composed(VARIANTS[name].options)) for name in FLAGS},
}


@pytest.mark.parametrize("name", EQUALS)
def test_equals_what_it_composes(name: str) -> None:
    """Logits and every gradient, under the same names. Caught: an option that says another thing here."""
    architecture, lines = EQUALS[name]
    model, weights = jittered(architecture, SMALL)
    with_ = composed_encoder_decoder_with if architecture.has_encoder else composed_with
    other = build_model(config(with_(**lines), SMALL)).double()
    load_weights(other, weights)
    tokens, targets = random_batch(architecture, SMALL, 3, 9)
    targets, doc_ids = documents(architecture, SMALL, targets)
    found = []
    for each in (model, other):
        loss, _ = each.loss(tokens, targets, doc_ids)
        loss.backward()
        found.append(export_gradients(each) | {"logits": each(tokens, doc_ids=doc_ids).detach()})
    assert found[0].keys() == found[1].keys()
    assert max(error(found[1][key], x) for key, x in found[0].items()) < 1e-12


@pytest.mark.parametrize("norm", ["pn", "pn_v", "batch", "layer"])
def test_equals_powernorm(norm: str) -> None:
    """Statistics too, in and after the warm-up. Caught: running statistics that do not move, or move twice; LayerNorm
    without its layer-scale."""
    options = {"norm": norm, "psi_warmup_steps": 1, "group_scaling": 4, "alpha_fwd": 0.8, "alpha_bkw": 0.93}
    model, weights = jittered(powernorm_with(**options), SMALL)
    other = build_model(config(composed_with(**options), SMALL)).double()
    load_weights(other, weights)
    for step in range(3):
        tokens, targets = random_batch(ARCHITECTURES["powernorm"], SMALL, 3, 9, seed=step)
        targets, doc_ids = documents(ARCHITECTURES["powernorm"], SMALL, targets)
        found = []
        for each in (model, other):
            each.zero_grad()
            each.begin_step_(step, torch.tensor(0.5, dtype=torch.float64))
            loss, _ = each.loss(tokens, targets, doc_ids)
            (0.5 * loss).backward()
            found.append(export_gradients(each) | each.statistics() | {"loss": loss.detach()})
        assert found[0].keys() == found[1].keys()
        assert max(error(found[1][key], x, 1e-6) for key, x in found[0].items()) < 1e-12
    assert model.notes() == other.notes()


# PowerNorm in every place.

PLACES = {
    "pre": {"norm_placement": "pre", "ffn_norm": "norm"},
    "post": {"norm_placement": "post", "ffn_norm": "norm"},
    "peri": {"norm_placement": "peri", "head_scale": "before", "res_scale": "both"},
    "reordered": {"norm_placement": "reordered", "mlp": "plain", "bias": True},
}
GROUPED = Size(d_model=16, n_layers=2, n_heads=4, vocab_size=23, n_kv_heads=2, d_mlp=24, source_context=8)
NORMS: dict[str, Callable[..., powernorm.Norm]] = {
    "pn": powernorm.PN,
    "pn_v": powernorm.PNV,
    "batch": powernorm.BatchNorm,
}


@pytest.mark.parametrize(
    ("with_", "norm", "placement"),
    [
        *((composed_with, "pn", name) for name in PLACES),
        (composed_encoder_decoder_with, "pn", "reordered"),
        (composed_encoder_decoder_with, "pn_v", "peri"),
        (composed_encoder_decoder_with, "batch", "post"),
    ],
)
def test_norms_over_the_batch_in_every_place(norm: str, placement: str, with_: Callable[..., Architecture]) -> None:
    """Six passes by the reference, padding in each. Caught: two norms of a block with each other's statistics, the
    decoder's padding for the encoder's, a place whose statistics do not move."""
    statistics = {"psi_warmup_steps": 1, "group_scaling": 4, "norm_eps": 1e-4}
    architecture = with_(norm=norm, **PLACES[placement], **statistics)
    model, weights = jittered(architecture, GROUPED)
    weights = {key: 0.3 * x if x.ndim == 2 and "embedding" not in key else x for key, x in weights.items()}
    load_weights(model, weights)
    expected = {key: x.clone().requires_grad_() for key, x in weights.items()}
    table = shapes(architecture, GROUPED)
    norms = {place: NORMS[norm](table[place][0], eps=1e-4) for place in reference.places(table)}
    s = source_length(architecture, GROUPED)
    for step in range(6):
        tokens, targets = random_batch(architecture, GROUPED, 3, 9, seed=step)
        targets, doc_ids = documents(architecture, GROUPED, targets, seed=step)
        in_source = {key: one for key, one in norms.items() if key.startswith(("encoder.", "norm_encoder"))}
        in_target = {key: one for key, one in norms.items() if key not in in_source}
        run: dict[str, Any] = {"groups": 4, "eps": 1e-4, "warmup": step == 0}
        functions = powernorm.in_training(in_source, valid=doc_ids[:, :s] >= 0, **run)
        functions |= powernorm.in_training(in_target, valid=doc_ids[:, s:] >= 0, **run)
        source = {"source": s} if s else {}
        given: dict[str, Any] = {"n_heads": 4, "doc_ids": doc_ids, "norms": functions, "norm": norm, **source}
        logits = reference.forward(expected, tokens, **given, **PLACES[placement])
        loss = loss_sum(logits, targets[:, s:])
        loss.backward()
        model.begin_step_(step, torch.tensor(1.0, dtype=torch.float64))
        actual, _ = model.loss(tokens, targets, doc_ids)
        actual.backward()
        assert actual.item() == pytest.approx(loss.item(), rel=1e-10)
        found = export_gradients(model)
        largest = max(x.grad.abs().max().item() for x in expected.values())  # type: ignore[union-attr]
        assert max(error(found[key], x.grad, 0.01 * largest) for key, x in expected.items()) < 1e-10  # type: ignore[arg-type]
        for place, one in norms.items():
            name, value = ("mu", one.mean) if isinstance(one, powernorm.BatchNorm) else ("psi_squared", one.psi2)
            torch.testing.assert_close(model.statistics()[f"{place}.{name}"], value, rtol=1e-10, atol=1e-12)
        for x in (*model.parameters(), *expected.values()):
            x.grad = None


RECIPE = Recipe(4, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=2)


def history(name: str, *options: str) -> list[dict[str, Tensor]]:
    """Loss, statistics and weights after each step of a run; its first two steps are PowerNorm's warm-up."""
    size = Size(d_model=16, n_layers=2, n_heads=4, vocab_size=61, n_kv_heads=4, d_mlp=32, source_context=10)
    lines = [f"model.{key}={value}" for key, value in PLACES["pre"].items()]
    state = build_state(
        run_config(
            name, size, RECIPE, rows=4, context=24, micro_rows=2, parallel="single",
            options=["model.norm=pn", *lines, *options],
        )
    )  # fmt: skip
    found = []
    for step in range(RECIPE.steps):
        batch = rows_of(name, 4, 24, size, step)
        result = train_step(state, list(zip(*(part.chunk(2) for part in batch), strict=True)))
        found.append({"loss": result.loss} | state.model.statistics() | export_weights(state.model))
        found[-1] = {key: x.clone() for key, x in found[-1].items()}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["composed", "composed_encoder_decoder"])
def test_compile_changes_nothing(name: str) -> None:
    """Caught: statistics that a compiled block advances by itself."""
    torch.compiler.reset()
    plain = history(name)
    compiled = history(name, "train.compile=true", "train.activation_checkpointing=full")
    # Two steps of the warm-up and one after it. Later ones are at weights that Adam has moved by their roundings.
    for one, other in zip(plain[:3], compiled[:3], strict=True):
        assert other["loss"].item() == pytest.approx(one["loss"].item(), rel=1e-5)
        for key in one:
            if key.endswith(("psi_squared", "nu")):
                assert error(other[key], one[key].double()) < 1e-3, key


# Initialisation, and options without an equation.


def test_deep_init() -> None:
    """Each stack counts its own blocks. Caught: l from 0, sqrt left out, the embedding counted."""
    options = {"n_encoder_layers": 3, "psi_warmup_steps": 0, "group_scaling": 0, "vocab_size": 61}
    plain, deep = (
        export_weights(build_model(ComposedEncoderDecoderConfig(d_model=16, n_layers=4, deep_init=wanted, **options)))
        for wanted in (False, True)
    )
    for key, x in plain.items():
        in_block = key.startswith(("layers.", "encoder.")) and x.ndim == 2
        layer = int(key.split(".")[1]) + 1 if in_block else 1
        torch.testing.assert_close(deep[key], x * layer**-0.5, rtol=1e-6, atol=0)


def test_first_values() -> None:
    """Caught: LayerScale from 1, DyT's alpha from 1, ResScale from 0."""
    options = {"psi_warmup_steps": 0, "group_scaling": 0, "vocab_size": 61, "n_layers": 1}
    model = build_model(ComposedConfig(norm="dyt", dyt_alpha=0.7, layer_scale=1e-5, res_scale="both", **options))
    starts = {"layer_scale_attn": 1e-5, "layer_scale_mlp": 1e-5, "res_scale": 1.0, "res_scale_attn": 1.0}
    starts |= {"norm_attn.alpha": 0.7, "norm_attn": 1.0, "norm_attn.bias": 0.0}
    weights = export_weights(model)
    for name, value in starts.items():
        assert weights[f"layers.0.{name}"].unique().tolist() == pytest.approx([value])


def test_bf16_statistics_are_in_fp32() -> None:
    """Every norm of a bf16 activation is the fp32 one, rounded. Caught: a mean or a tanh in bf16."""
    x = (50 + torch.randn(4, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    for norm in ("rms", "layer", "layer_no_bias", "layer_no_gain", "layer_plain", "cogview", "dyt", "derf"):
        made: Decoder = build_model(
            ComposedConfig(norm=norm, d_model=64, n_layers=1, psi_warmup_steps=0, group_scaling=0, vocab_size=61)
        )
        module: Any = made.norm_final
        assert module(x).dtype == torch.bfloat16
        assert torch.equal(module(x), module(x.float()).bfloat16()), norm


def test_derf() -> None:
    """Odd around -shift / alpha, within gain of bias, of slope gain alpha 2 / sqrt(pi) there, rising. Caught: tanh, the
    shift inside the product, an erf of another scale."""
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)[:, None].requires_grad_()
    norm = Derf(1, 0.5).double()
    starts = [parameter.item() for parameter in norm.parameters()]
    assert dict(zip(dict(norm.named_parameters()), starts, strict=True)) == {
        "alpha": 0.5,
        "gain": 1.0,
        "bias": 0.0,
        "shift": 0.0,
    }
    with torch.no_grad():
        for name, value in {"gain": 1.5, "bias": 0.25, "shift": 0.5}.items():
            getattr(norm, name).fill_(value)
    y = norm(x)
    slopes = torch.autograd.grad(y.sum(), x)[0]
    centre = 100  # x = -1 = -shift / alpha
    torch.testing.assert_close(y[centre + 1 : 201] - 0.25, -(y[:centre].flip(0) - 0.25), rtol=0, atol=1e-12)
    assert ((y - 0.25).abs() <= 1.5).all()
    assert slopes[centre].item() == pytest.approx(1.5 * 0.5 * 2 / math.sqrt(math.pi), rel=1e-12)
    assert (slopes > 0).all()


def test_gains_of_one_are_gpt() -> None:
    """At the start, where all gains are 1. Caught: a norm that keeps its gain beside the separate ones."""
    options = {"psi_warmup_steps": 0, "group_scaling": 0, "vocab_size": 61, "n_layers": 1, "d_model": 32}
    shared, separate = (build_model(ComposedConfig(separate_gains=wanted, **options)) for wanted in (False, True))
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(separate(tokens), shared(tokens), rtol=0, atol=1e-6)
    gains = {name: len(x) for name, x in export_weights(separate).items() if x.ndim == 1}
    names = [f"layers.0.gain_{matrix}" for matrix in ("wq", "wk", "wv", "w_u", "w_v")]
    assert gains == dict.fromkeys([*names, "norm_final"], 32)


def test_a_gain_preconditions_its_matrix() -> None:
    """A step of plain descent moves column j of W diag(gain) by gain_j^2 g_j + (g_j w_j) w_j.
    Caught: a gain that another matrix moves too."""
    generator = torch.Generator().manual_seed(0)
    linear = FusedLinear({"wq": 3, "wk": 2}, 4).double()
    linear.add_gains()
    linear.gains = torch.nn.Parameter(torch.rand(8, generator=generator, dtype=torch.float64))
    torch.nn.init.normal_(linear.matrix, generator=generator)
    before, w = linear.weight(torch.float64).detach(), linear.matrix.detach().clone()
    gain = linear.gains.detach().view(2, 4).repeat_interleave(torch.tensor([3, 2]), 0)
    g, eta = torch.randn(5, 4, generator=generator, dtype=torch.float64), 1e-7
    (linear.weight(torch.float64) * g).sum().backward()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter -= eta * parameter.grad  # type: ignore[operator]
    projections = torch.cat([part.sum(0).expand(len(part), 4) for part in (g * w).split([3, 2])])
    found = (before - linear.weight(torch.float64).detach()) / eta
    torch.testing.assert_close(found, gain**2 * g + projections * w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("separate", [False, True])
def test_input_gains_decay(separate: bool) -> None:
    """Caught: a gain of q, of a norm after a sublayer, or a bias that decays; a matrix in the gains' group."""
    keys = {"norm_placement": "peri", "qk_norm": True, "bias": True, "ffn_norm": "norm", "res_scale": "both"}
    none = {"psi_warmup_steps": 0, "group_scaling": 0, "vocab_size": 61, "n_layers": 1, "input_gain_decay": True}
    groups = build_model(ComposedConfig(separate_gains=separate, **keys, **none)).parameter_groups()
    assert [group.decay for group in groups] == [True, True, False]
    of_norms = [] if separate else ["layers.0.norm_attn.gain", "layers.0.norm_mlp.gain"]
    of_products = ["layers.0.attention.wqkv.gains", "layers.0.mlp.w_uv.gains"] if separate else []
    assert set(groups[1].names) == {*of_norms, *of_products, "layers.0.norm_ffn.gain", "norm_final.gain"}
    assert "layers.0.attention.q_norm.gain" in groups[2].names
