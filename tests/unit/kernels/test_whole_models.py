"""Models on Triton's kernels are the models in plain PyTorch."""

import logging

import pytest
import torch

from benchmarks.step import saved_activations
from ngpt_train.core import log
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.dispatch import chosen
from ngpt_train.models import export_gradients
from ngpt_train.training import build_state
from tests.properties.architectures import ARCHITECTURES, VARIANTS, Size, error, jittered, random_batch
from tests.properties.runs import run_config
from tests.reference.training import Recipe

TINY = Size(32, n_layers=1, n_heads=2, vocab_size=48, n_kv_heads=1, d_mlp=40, n_encoder_layers=1, source_context=4)
# Models that give the kernels other arguments: of the rotation, of scales, of cross-attention.
CALLERS = ["gpt", "gpt+qk_norm", "ngpt", "ntransformer", "normformer"]
CALLERS += [f"ngpt {option}" for option in ("without qk-norm", "interleaved", "scalars")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLERS)
def test_fused_is_plain(name: str) -> None:
    """Logits, loss and every gradient in fp32. Caught: a kernel that is told another scale, layout or option."""
    architecture = (ARCHITECTURES | VARIANTS)[name]
    found = {}
    for kernels in ("torch", "triton"):
        model, _ = jittered(architecture, TINY, torch.float32)
        tokens, targets = random_batch(architecture, TINY, 2, 5)
        with chosen(kernels):
            loss, _ = model.loss(tokens, targets)
            loss.backward()
            found[kernels] = {"logits": model(tokens).detach(), "loss": loss.detach(), **export_gradients(model)}
    assert found["triton"].keys() == found["torch"].keys()
    largest = max(x.abs().max().item() for x in found["torch"].values())
    for key, expected in found["torch"].items():
        assert error(found["triton"][key], expected, floor=1e-3 * largest) < 1e-4, key
    assert not torch.equal(found["triton"]["loss"], torch.zeros(()))


@pytest.mark.parametrize(
    ("variant", "lines"),
    [
        ("ngpt slerp in the mlp", ["sphere_step model.update_mlp=slerp"]),
        ("ngpt eps", ["rotary model.norm_eps", "sphere_step model.norm_eps"]),
        ("ngpt eps without qk-norm", ["sphere_step model.update=riemannian"]),
        ("ngpt shared s_qk", []),
        ("ngpt gelu", ["swiglu model.activation=gelu"]),
        ("gpt gelu", ["swiglu model.activation=gelu"]),
        (
            "ntransformer slerp in cross",
            ["rotary queries", "sphere_step model.update_cross=slerp", "sphere_step model.update_mlp=riemannian"],
        ),
    ],
)
def test_the_key_without_a_kernel_is_named(variant: str, lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Caught: model.update for the key of a block, no word about eps, a kernel that knows one left out."""
    log._said.clear()
    caplog.set_level(logging.WARNING, "ngpt_train")
    model, _ = jittered(VARIANTS[variant], TINY, torch.float32)
    with chosen("triton"):
        model(torch.zeros(1, 7, dtype=torch.long))
    said = [record.getMessage() for record in caplog.records]
    assert sorted(f"{line.split()[1]} {line.split('does not know ')[1].split()[0]}" for line in said) == lines


def kept(name: str, kernels: str, precision: str, compiled: bool, rows: int, context: int) -> int:
    """Bytes for the backward pass of rows * context tokens."""
    recipe = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)
    config = run_config(name, TINY, recipe, rows=rows, context=context, micro_rows=rows, parallel="single")
    config.kernels.kind, config.train.precision, config.train.compile = kernels, precision, compiled
    with chosen(kernels):
        return saved_activations(build_state(config))


@pytest.mark.parametrize(
    ("kernels", "precision", "measured"),
    [
        ("torch", "fp32", (39_488, 40_832)),
        ("torch", "bf16", (39_232, 37_504)),
        pytest.param("triton", "bf16", (39_232, 36_480), marks=pytest.mark.slow),
    ],
)
def test_saved_activations(kernels: str, precision: str, measured: tuple[int, int]) -> None:
    """GPT and nGPT keep no more for their backward pass than measured. Caught: a normalised copy that is kept; on CPUs
    torch's RMSNorm, which would keep such copies."""
    found = [kept(name, kernels, precision, compiled=False, rows=1, context=16) for name in ("gpt", "ngpt")]
    assert min(found) > 16 * 1 * 32 * 2 * 10
    assert all(here <= bytes_ + 400 for here, bytes_ in zip(found, measured, strict=True))  # a hidden state has 1,024


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_saved_activations_of_compiled_blocks(kernels: str) -> None:
    """The same where the compiler chooses the saved tensors. Caught: rotated heads that it keeps beside the product."""
    gpt, ngpt = (kept(name, kernels, "fp32", compiled=True, rows=2, context=32) for name in ("gpt", "ngpt"))
    assert gpt > 32 * 2 * 32 * 2 * 10
    assert ngpt <= 1.1 * gpt


def test_one_argument_of_another_dtype() -> None:
    """Caught: a kernel that is chosen by its first argument alone, and reads fp64 as fp32."""
    h, x = torch.nn.functional.normalize(torch.randn(2, 8), dim=-1), torch.randn(2, 8)
    with chosen("triton"):
        assert dispatch.runs_on_triton("sphere_step", h, x)
        assert not dispatch.runs_on_triton("sphere_step", h, x.double())


@pytest.mark.parametrize("option", ["slerp", "gelu"])
def test_what_has_no_kernel_compiles(option: str) -> None:
    """Without a break of the graph. Caught: a line in the log that the compiler stumbles over."""
    model, _ = jittered(VARIANTS[f"ngpt {option}"], TINY, torch.float32)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    log._said.clear()
    with chosen("triton"):
        eager = model(tokens)
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(model(tokens), eager)
