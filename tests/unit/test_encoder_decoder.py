"""The encoder-decoders: the equations of tests/reference/ntransformer.py, and what every architecture promises."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ngpt_train.config.architectures import (
    AlphaConfig,
    GPTEncoderDecoderConfig,
    MLPScaleConfig,
    NTransformerConfig,
    ScaleVectorConfig,
)
from ngpt_train.models import Decoder, build_model, export_weights, load_weights
from ngpt_train.training import build_state, train_step
from tests.properties.architectures import Architecture, Shapes, Size, config, export_gradients
from tests.properties.runs import run_config, text_like_rows
from tests.reference import gpt, ntransformer
from tests.reference.attention import loss_sum
from tests.reference.training import Recipe

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/distributed/encoder_decoder_worker.py"


@dataclass(frozen=True)
class TwoSizes(Size):
    n_encoder_layers: int
    source_context: int


SMALL = TwoSizes(32, 2, 4, 61, n_kv_heads=4, d_mlp=128, n_encoder_layers=3, source_context=14)
GROUPED = TwoSizes(24, 3, 6, 31, n_kv_heads=2, d_mlp=50, n_encoder_layers=2, source_context=5)
CASES = {  # size, rows, tokens of the decoder
    "usual": (SMALL, 3, 9),
    "grouped queries": (GROUPED, 2, 11),
    "one key head": (TwoSizes(24, 1, 6, 31, n_kv_heads=1, d_mlp=17, n_encoder_layers=2, source_context=3), 2, 5),
    "one token each": (dataclasses.replace(SMALL, source_context=1), 4, 1),
}


def gpt_with(**options: Any) -> Architecture:
    table = partial(
        ntransformer.baseline_shapes,
        qk_norm=options.get("qk_norm", False),
        tied=options.get("tied_embeddings", False),
    )
    told = {name: options[name] for name in ("rope_layout", "rope_base", "norm_eps") if name in options}
    forward = partial(ntransformer.baseline_forward, **told)
    return Architecture(GPTEncoderDecoderConfig, table, gpt.random_weights, forward, options)


def ntransformer_with(scales: dict[str, tuple[str, float, float]] | None = None, **options: Any) -> Architecture:
    """`scales`: kind, init and scale of those that are not the paper's."""
    kinds = {"s_qk": ScaleVectorConfig, "s_z": ScaleVectorConfig, "s_u": MLPScaleConfig, "s_v": MLPScaleConfig}
    chosen = {name: kinds.get(name, AlphaConfig)(*three) for name, three in (scales or {}).items()}
    parametrization = options.get("constraint") == "parametrization"
    names = ("alpha_sign", "qk_norm", "update", "activation", "rope_layout", "rope_base")
    told = {name: options[name] for name in names if name in options}
    return Architecture(
        NTransformerConfig,
        partial(ntransformer.shapes, scales=scales, tied=options.get("tied_embeddings", False)),
        partial(ntransformer.random_weights, scales=scales, parametrization=parametrization),
        partial(ntransformer.forward, scales=scales, parametrization=parametrization, **told),
        options | chosen,
    )


ARCHITECTURES = {
    "gpt_encoder_decoder": gpt_with(),
    "gpt_encoder_decoder+qk_norm": gpt_with(qk_norm=True),
    "ntransformer": ntransformer_with(),
}
VARIANTS = {
    "gpt tied": gpt_with(tied_embeddings=True, rope_base=50.0, norm_eps=1e-2),
    "gpt interleaved": gpt_with(rope_layout="interleaved", qk_norm=True),
    "slerp": ntransformer_with(update="slerp"),
    "riemannian": ntransformer_with(update="riemannian"),
    "free alpha": ntransformer_with(alpha_sign="free"),
    "without qk-norm": ntransformer_with(qk_norm=False),
    "gelu": ntransformer_with(activation="gelu"),
    "tied": ntransformer_with(tied_embeddings=True, rope_base=50.0),
    "interleaved": ntransformer_with(rope_layout="interleaved"),
    "parametrization": ntransformer_with(constraint="parametrization"),
    "unconstrained": ntransformer_with(constraint="none"),
    "scalars": ntransformer_with(
        {
            "s_qk": ("scalar", 1.0, 0.3),
            "s_u": ("scalar", 0.5, 1.0),
            "s_v": ("scalar", 1.2, 0.25),
            "s_z": ("scalar", 3.0, 0.5),
            "alpha_attn": ("scalar", 0.05, 0.1),
            "alpha_cross": ("scalar", 0.15, 0.2),
            "alpha_mlp": ("scalar", 0.25, 0.1),
        }
    ),
    "fixed": ntransformer_with(
        {
            "s_qk": ("fixed", 1.5, 0.3),
            "s_u": ("fixed", 0.5, 1.0),
            "s_v": ("fixed", 1.2, 0.25),
            "s_z": ("fixed", 9.0, 0.5),
            "alpha_attn": ("fixed", 0.1, 0.1),
            "alpha_cross": ("fixed", 0.15, 0.2),
            "alpha_mlp": ("fixed", 0.25, 0.1),
        }
    ),
    "starts": ntransformer_with(
        {
            "s_qk": ("vector", 0.33, 1.0),
            "s_v": ("vector", 0.7, 0.3),
            "s_z": ("vector", 6.0, 1.0),
            "alpha_attn": ("vector", 0.1, 0.5),
            "alpha_cross": ("vector", 0.15, 0.3),
            "alpha_mlp": ("vector", 0.2, 0.1),
        }
    ),
}

architectures = pytest.mark.parametrize("name", ARCHITECTURES)
sizes = pytest.mark.parametrize("size", [SMALL, GROUPED], ids=["small", "grouped"])


def shapes(architecture: Architecture, size: TwoSizes) -> Shapes:
    return architecture.shapes(
        size.d_model,
        size.n_layers,
        size.n_heads,
        size.vocab_size,
        n_encoder_layers=size.n_encoder_layers,
        n_kv_heads=size.n_kv_heads,
        d_mlp=size.d_mlp,
    )


def jittered(
    architecture: Architecture, size: TwoSizes, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Decoder, dict[str, Tensor]]:
    """A model with random weights away from their init, and the same weights in fp64 for the reference."""
    drawn = architecture.random_weights(shapes(architecture, size), seed)
    weights = {name: x.to(dtype).double() for name, x in drawn.items()}
    model = build_model(config(architecture, size)).to(dtype)
    load_weights(model, {name: x.to(dtype) for name, x in weights.items()})
    return model, weights


def random_batch(size: TwoSizes, rows: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """tokens and targets (rows, source_context + t): none in the source, a quarter of the others -100, never all."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (
        torch.randint(size.vocab_size, (rows, size.source_context + t), generator=generator) for _ in range(2)
    )
    targets[torch.rand(targets.shape, generator=generator) < 0.25] = -100
    targets[:, : size.source_context] = -100
    targets[0, size.source_context] = 0
    return tokens, targets


def padded(size: TwoSizes, targets: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """targets and document ids: padding anywhere in the source, before and after two documents of the decoder."""
    generator = torch.Generator().manual_seed(seed)
    rows, s, t = len(targets), size.source_context, targets.shape[1] - size.source_context
    read = torch.randint(2, (rows, s), generator=generator)
    read[torch.rand(rows, s, generator=generator) < 0.4] = -1
    read[:, -1] = read[:, -1].clamp(min=0)  # nobody has nothing to attend to
    written = torch.arange(t).ge(t // 2).long().repeat(rows, 1)
    if t > 4:
        written[0, :2] = -1
        written[-1, -2:] = -1
    doc_ids = torch.cat([read, written], 1)
    return targets.masked_fill(doc_ids < 0, -100), doc_ids


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest expected value (at least `floor`)."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=floor)).item()


@pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES)
@architectures
def test_logits_loss_and_gradients(name: str, case: str, dtype: torch.dtype, padding: bool) -> None:
    check(ARCHITECTURES[name], case, dtype, padding)


@pytest.mark.parametrize("case", ["usual", "grouped queries"])
@pytest.mark.parametrize("name", VARIANTS)
def test_options(name: str, case: str) -> None:
    check(VARIANTS[name], case, torch.float64, padding=case == "usual")


def check(architecture: Architecture, case: str, dtype: torch.dtype, padding: bool) -> None:
    size, rows, t = CASES[case]
    model, weights = jittered(architecture, size, dtype)
    tokens, targets = random_batch(size, rows, t)
    doc_ids = None
    if padding:
        targets, doc_ids = padded(size, targets)
    # fp32 three times as far off as in tests/unit/test_models.py: rounding adds up over two stacks.
    small, large = (1e-12, 1e-12) if dtype == torch.float64 else (3e-6, 3e-5)

    for x in weights.values():
        x.requires_grad_()
    logits = architecture.forward(weights, tokens, source=size.source_context, n_heads=size.n_heads, doc_ids=doc_ids)
    loss = loss_sum(logits, targets[:, size.source_context :])
    loss.backward()

    actual_logits = model(tokens, doc_ids=doc_ids)
    assert actual_logits.shape == (rows, t, size.vocab_size)
    assert actual_logits.dtype == dtype
    assert error(actual_logits.detach(), logits.detach()) < small
    actual, n_tokens = model.loss(tokens, targets, doc_ids)
    assert int(n_tokens) == int((targets != -100).sum())
    assert actual.item() == pytest.approx(loss.item(), rel=small)

    actual.backward()
    gradients = export_gradients(model)
    assert gradients.keys() == weights.keys()
    # A gradient that vanishes is compared on the scale of the others: of W_q and W_k with one key, and of s_u as one
    # number, which changes a length that is normalised away.
    largest = max(x.grad.abs().max().item() for x in weights.values())  # type: ignore[union-attr]
    vanishes = {key for key, x in weights.items() if key.endswith("s_u") and x.numel() == 1}
    floors = {key: largest if key in vanishes else 1e-4 * largest for key in weights}
    errors = {key: error(gradients[key], x.grad, floors[key]) for key, x in weights.items()}  # type: ignore[arg-type]
    assert max(errors.values()) < large, {key: f"{e:.1e}" for key, e in errors.items() if e >= large}


@architectures
@sizes
def test_later_tokens_do_not_matter_and_all_of_the_source_does(name: str, size: TwoSizes) -> None:
    model, _ = jittered(ARCHITECTURES[name], size)
    s, t = size.source_context, 10
    tokens, _ = random_batch(size, 2, t)
    with torch.no_grad():
        before = model(tokens)
        for place in range(s + t):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % size.vocab_size
            after = model(changed)
            first = max(0, place - s)
            assert torch.equal(after[:, :first], before[:, :first])
            change = (after[:, first:] - before[:, first:]).abs().amax(-1) / before.abs().max()
            assert change.min() > 1e-9, f"token {place} is not seen by every position from it on"


@architectures
@sizes
def test_padding_is_as_if_it_were_not_there(name: str, size: TwoSizes) -> None:
    """Whatever stands in it; and at the end of the source it is as good as a shorter source."""
    architecture = ARCHITECTURES[name]
    model, weights = jittered(architecture, size)
    s = size.source_context
    tokens, targets = random_batch(size, 3, 8)
    targets, doc_ids = padded(size, targets)
    padding = doc_ids < 0
    assert padding[:, :s].any()
    assert padding[:, s:].any()
    others = torch.where(padding, (tokens + 7) % size.vocab_size, tokens)
    real = ~padding[:, s:]
    with torch.no_grad():
        before, after = model(tokens, doc_ids=doc_ids), model(others, doc_ids=doc_ids)
        assert torch.equal(after[real], before[real])
        assert (model(others)[real] != model(tokens)[real]).any()  # not so if nobody says that it is padding
        assert model.loss(others, targets, doc_ids)[0].item() == model.loss(tokens, targets, doc_ids)[0].item()

        shorter, _ = jittered(architecture, dataclasses.replace(size, source_context=s - 2))
        load_weights(shorter, weights)
        ids = torch.zeros_like(tokens)
        ids[:, s - 2 : s] = -1
        ids[:, -3:] = -1
        kept = [*range(s - 2), *range(s, tokens.shape[1] - 3)]
        assert error(model(tokens, doc_ids=ids)[:, :-3], shorter(tokens[:, kept])) < 1e-12


@architectures
def test_targets_in_the_source_do_not_count(name: str) -> None:
    model, _ = jittered(ARCHITECTURES[name], SMALL)
    tokens, targets = random_batch(SMALL, 2, 6)
    expected, n_tokens = model.loss(tokens, targets)
    targets[:, : SMALL.source_context] = 1
    actual, n_actual = model.loss(tokens, targets)
    assert (actual.item(), int(n_actual)) == (expected.item(), int(n_tokens))
    with pytest.raises(ValueError, match="none is left to decode"):
        model(tokens[:, : SMALL.source_context])


@architectures
def test_initial_loss(name: str) -> None:
    size = TwoSizes(128, 4, 4, 1009, n_kv_heads=4, d_mlp=512, n_encoder_layers=3, source_context=32)
    torch.manual_seed(0)
    model = build_model(config(ARCHITECTURES[name], size))
    tokens, targets = (torch.randint(size.vocab_size, (8, 64)) for _ in range(2))
    with torch.no_grad():
        variance = model(tokens).var(-1).mean().item()
        loss, n_tokens = model.loss(tokens, targets)
    assert int(n_tokens) == 8 * 32
    assert variance > 1e-3
    assert loss.item() / n_tokens == pytest.approx(math.log(size.vocab_size) + variance / 2, abs=0.05)


@architectures
def test_initial_weights(name: str) -> None:
    """N-Transformer: any direction, vectors at their scale; baseline: N(0, 0.02), smaller into the residual stream."""
    size = TwoSizes(128, 3, 4, 512, n_kv_heads=4, d_mlp=512, n_encoder_layers=3, source_context=32)
    weights = export_weights(build_model(config(ARCHITECTURES[name], size)))
    for key, x in weights.items():
        if x.ndim == 1:
            stored = {"s_u": 1.0, "s_v": 1.0}.get(key.split(".")[-1], 128**-0.5)
            assert x.unique().tolist() == pytest.approx([stored if name == "ntransformer" else 1.0], rel=1e-6), key
        elif name == "ntransformer":
            assert x.std().item() == pytest.approx(128**-0.5, rel=0.03), key
        elif key.endswith((".wo", ".w_down")):
            assert 0.005 < x.std().item() < 0.011, key  # of 6 or 9 matrices: between 0.02 / sqrt(9) and 0.02 / sqrt(6)
        else:
            assert x.std().item() == pytest.approx(0.02, rel=0.03), key
        assert x.ndim == 1 or abs(x.mean().item()) < 0.03 * x.std().item(), key
    flat = [x.flatten()[:1000] for x in weights.values() if x.ndim == 2]
    assert torch.corrcoef(torch.stack(flat)).fill_diagonal_(0).abs().max() < 0.2, "matrices drawn alike"


def test_parameter_counts() -> None:
    """The TnT paper's size (its 325.24M leave out s_z and the s_qk of cross-attention), and the baseline's."""
    size = TwoSizes(1024, 6, 8, 32100, n_kv_heads=8, d_mlp=4096, n_encoder_layers=6, source_context=1024)
    matrices = 3 * 32100 * 1024 + 6 * 16 * 1024**2 + 6 * 20 * 1024**2
    expected = {
        "ntransformer": 325_283_172,
        "gpt_encoder_decoder": matrices + 1024 * (6 * 2 + 6 * 3 + 2),
        "gpt_encoder_decoder+qk_norm": matrices + 1024 * (6 * 2 + 6 * 3 + 2) + 128 * 2 * (6 + 2 * 6),
    }
    for name, architecture in ARCHITECTURES.items():
        with torch.device("meta"):
            model = build_model(config(architecture, size, context=2048))
        assert len(model.blocks()) == 12  # compiled, recomputed and sharded one by one
        assert model.n_params() == expected[name] == sum(p.numel() for p in model.parameters())
        assert {key: tuple(x.shape) for key, x in export_weights(model).items()} == shapes(architecture, size)


@pytest.mark.parametrize("t", [7, 16])
@architectures
@sizes
def test_flops_are_what_is_counted(name: str, size: TwoSizes, t: int) -> None:
    model = build_model(config(ARCHITECTURES[name], size))
    tokens, _ = random_batch(size, 2, t)
    context = tokens.shape[1]
    # The plain attention multiplies whole rectangles, which is the convention of the formula.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    # An integer per token, where the row's total need not divide by its tokens.
    assert model.flops_per_token(context) == 3 * counter.get_total_flops() // tokens.numel()
    causal = 12 * size.d_model * size.n_layers * (t * t - t * t // 2)
    assert model.flops_per_token(context, causal=True) == (
        (3 * counter.get_total_flops() // 2 - causal) // context
    )  # half of the decoder's own attention, and of nothing else


@architectures
@sizes
def test_export_and_load_round_trip(name: str, size: TwoSizes) -> None:
    source, weights = jittered(ARCHITECTURES[name], size, torch.float32)
    exported = export_weights(source)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[key], x.float()) for key, x in weights.items())
    target = build_model(config(ARCHITECTURES[name], size))
    load_weights(target, exported)
    tokens, _ = random_batch(size, 2, 9)
    assert torch.equal(target(tokens), source(tokens))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert all(torch.equal(exported[key], x.float()) for key, x in weights.items()), "not copies"


@architectures
def test_projection(name: str) -> None:
    """Unit rows for the N-Transformer, those of cross-attention and of the source's table too; baseline: nothing."""
    constrained = name == "ntransformer"
    model = build_model(config(ARCHITECTURES[name], SMALL))
    for step in ("initialised", "moved"):
        if step == "moved":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            before = export_weights(model)
            model.project_()
            changed = {key for key, x in export_weights(model).items() if not torch.equal(x, before[key])}
            assert changed == ({key for key, x in before.items() if x.ndim == 2} if constrained else set())
        if constrained:
            for x in export_weights(model).values():
                if x.ndim == 2:
                    torch.testing.assert_close(x.norm(dim=-1), torch.ones(len(x)), rtol=0, atol=1e-6)


@architectures
def test_decay_is_for_the_baselines_matrices(name: str) -> None:
    model = build_model(config(ARCHITECTURES[name], SMALL))
    decayed = {key: group.decay for group in model.parameter_groups() for key in group.names}
    parameters = dict(model.named_parameters())
    assert decayed == {key: name != "ntransformer" and p.ndim == 2 for key, p in parameters.items()}


@architectures
def test_one_batch_can_be_overfitted(name: str) -> None:
    torch.manual_seed(0)
    size = dataclasses.replace(SMALL, source_context=6)
    model = build_model(config(ARCHITECTURES[name], size))
    tokens, targets = (torch.randint(size.vocab_size, (4, 16)) for _ in range(2))
    tokens[:, 6:] = torch.arange(10)  # which row it is can be read in the source alone
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(100):
        loss, n_tokens = model.loss(tokens, targets)
        losses.append(loss.item() / int(n_tokens))
        optimizer.zero_grad()
        (loss / n_tokens).backward()
        optimizer.step()
        model.project_()
    assert losses[0] > 4
    assert losses[-1] < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
@architectures
def test_compiled_is_eager(name: str, padding: bool) -> None:
    tokens, targets = random_batch(SMALL, 2, 12)
    doc_ids = None
    if padding:
        targets, doc_ids = padded(SMALL, targets)
    eager, compiled = (jittered(ARCHITECTURES[name], SMALL, torch.float32)[0] for _ in range(2))
    torch.compiler.reset()
    for block in compiled.blocks():
        block.compile(dynamic=False)
    losses = []
    for model in (eager, compiled):
        loss, _n_tokens = model.loss(tokens, targets, doc_ids)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for actual, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        largest = expected.grad.abs().max().item()
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-5 * largest)


@architectures
def test_generation_reads_the_prompt_as_a_source(name: str) -> None:
    """The last token of the prompt begins the decoder; what is before it is the source, padded or its end."""
    model, weights = jittered(ARCHITECTURES[name], SMALL)
    s, context = SMALL.source_context, 96
    generator = torch.Generator().manual_seed(0)
    for p, n in ((s + 1, 0), (s + 1, 4), (s + 6, 3), (4, 0), (4, 5), (2, 2), (s + 1, context)):
        prompt, new = (torch.randint(SMALL.vocab_size, (length,), generator=generator) for length in (p, n))
        source, written = prompt[:-1][-s:], torch.cat([prompt[-1:], new])[-(context - s) :]
        expected = ARCHITECTURES[name].forward(
            weights, torch.cat([source, written])[None], source=len(source), n_heads=SMALL.n_heads
        )[0, -1]
        assert error(model.next_token_logits(prompt, new), expected) < 1e-12
    assert model.next_token_logits(prompt[:1], new[:3]).isfinite().all()


RECIPES = {
    "gpt_encoder_decoder": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=2),
    "ntransformer": Recipe(12, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0),
}
RUN_SIZE = dataclasses.replace(SMALL, source_context=10)
RUN_CONTEXT = 32


def padded_rows(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that can be learned, each shorter than the one before and with padding in its source."""
    tokens, targets = text_like_rows(rows, RUN_CONTEXT, RUN_SIZE.vocab_size, seed)
    lengths = torch.linspace(RUN_CONTEXT, RUN_SIZE.source_context + 4, rows).long()
    doc_ids = torch.where(torch.arange(RUN_CONTEXT) < lengths[:, None], 0, -1)
    doc_ids[:, 3:6] = -1  # which, unlike padding at the end, the decoder would see
    targets = targets.masked_fill(doc_ids < 0, -100)
    targets[:, : RUN_SIZE.source_context] = -100
    return tokens, targets, doc_ids


@pytest.mark.parametrize("name", RECIPES)
def test_training_through_the_step_contract(name: str) -> None:
    """The loss of a step is that of the reference with the weights before it, whatever the micro batches."""
    runs = []
    for micro_rows in (1, 4):
        given = run_config(
            name, RUN_SIZE, RECIPES[name], rows=8, context=RUN_CONTEXT, micro_rows=micro_rows, parallel="single"
        )
        state = build_state(given)
        losses = []
        for step in range(RECIPES[name].steps):
            batch = padded_rows(8, seed=step)
            weights = {key: x.double() for key, x in export_weights(state.model).items()}
            result = train_step(state, list(zip(*(part.split(micro_rows) for part in batch), strict=True)))
            losses.append(result.loss.item())
            tokens, targets, doc_ids = batch
            assert int(result.n_tokens) == int((targets != -100).sum())
            logits = ARCHITECTURES[name].forward(weights, tokens, source=10, n_heads=SMALL.n_heads, doc_ids=doc_ids)
            expected = loss_sum(logits, targets[:, 10:]) / result.n_tokens
            assert losses[-1] == pytest.approx(expected.item(), rel=1e-6)
        assert losses[-1] < 0.95 * losses[0]
        runs.append(losses)
        if name == "ntransformer":
            final = export_weights(state.model)
            assert all((x.norm(dim=-1) - 1).abs().max() < 1e-6 for x in final.values() if x.ndim == 2)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


LAYOUTS = {"ddp(2)": ("ddp", 2), "fsdp(2)": ("fsdp", 4)}  # parallel, micro batches per rank and step


def launch(out: Path, name: str, ranks: int, parallel: str, accumulation: int) -> list[dict[str, Any]]:
    """What each rank reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    finished = subprocess.run(
        [*command, str(WORKER), str(out), name, parallel, str(accumulation)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("name", RECIPES)
def test_layouts_agree(name: str, tmp_path: Path) -> None:
    (expected,) = launch(tmp_path / "single", name, 1, "single", 1)
    assert expected["losses"][-1] < 0.95 * expected["losses"][0]
    assert max(expected["norms"]) > RECIPES[name].clip_norm
    assert expected["unmoved"] == []
    for layout, (parallel, accumulation) in LAYOUTS.items():
        ranks = launch(tmp_path / parallel, name, 2, parallel, accumulation)
        for run in ranks:
            assert run["sharded"] == ("fsdp" in layout)
            assert run["initial"] == expected["initial"]
            assert run["held"] == ranks[0]["held"]
            assert run["tokens"] == expected["tokens"]
            assert run["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            # Later ones drift by rounding alone, in one process with other micro batches as much as here.
            assert run["norms"][:4] == pytest.approx(expected["norms"][:4], rel=1e-6)
            assert run["unmoved"] == []
            assert name != "ntransformer" or run["off_sphere"] < 1e-6
