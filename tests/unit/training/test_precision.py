"""bf16 is for matrix products and activations; vectors, the loss and what the optimizer holds stay fp32."""

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ngpt_train.distributed.layouts import why_precision
from ngpt_train.kernels.dispatch import chosen
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.layers.norms import RMSNorm
from ngpt_train.models.ngpt.model import ScaledParameter
from ngpt_train.training import build_state, train_step
from ngpt_train.training.state import TrainState
from tests.properties.architectures import ARCHITECTURES, SMALL, Size, config, random_batch
from tests.properties.runs import run_config, text_like_rows
from tests.reference.training import Recipe

ROWS, T = 4, 16
WIDE = Size(d_model=128, n_layers=4, n_heads=4, vocab_size=512, n_kv_heads=4, d_mlp=512)
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=1.0, warmup_steps=0)
BF16, FP32 = {torch.bfloat16}, {torch.float32}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul"}


def bf16_state(name: str, parallel: str) -> TrainState:
    given = run_config(name, SMALL, RECIPE, rows=ROWS, context=T, micro_rows=ROWS, parallel=parallel)
    options: dict[str, Any] = {"qk_norm": True} if name == "gpt" else {}
    train, model = replace(given.train, precision="bf16"), replace(given.model, **options)
    state = build_state(replace(given, train=train, model=model))
    assert any(isinstance(p, DTensor) for p in state.model.parameters()) == (parallel == "fsdp")
    return state


class Watch(TorchDispatchMode):
    """The dtypes that pass through matrix products, attention and the loss, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        kinds = {
            "product": operation in PRODUCTS,
            "attention": operation.endswith("attention_for_cpu"),
            "attention's gradients": operation.endswith("attention_for_cpu_backward"),
            "loss": operation in ("exp_", "log"),
        }
        # Three operands are enough: those of attention's backward end with its fp32 logsumexp.
        dtypes = {x.dtype for x in args[:3] if isinstance(x, Tensor) and x.is_floating_point()}
        for kind in (kind for kind, applies in kinds.items() if applies):
            self.seen[kind] |= dtypes
        return func(*args, **(kwargs or {}))


def watch_modules(model: Decoder, seen: dict[str, set[torch.dtype]]) -> None:
    """Records what each vector and each block looks like to the forward pass of `model`."""

    def output_of(kind: str) -> Any:
        return lambda module, inputs, output: seen[kind].update(x.dtype for x in tree_leaves(output))

    def gain(module: nn.Module, inputs: Any) -> None:
        assert isinstance(module, RMSNorm)
        seen["vector"].add(module.gain.dtype)

    for module in model.modules():
        if isinstance(module, ScaledParameter):
            module.register_forward_hook(output_of("vector"))
        if isinstance(module, RMSNorm):
            module.register_forward_pre_hook(gain)
    for block in model.layers:
        block.register_forward_hook(output_of("residual"))
    model.register_forward_hook(lambda module, inputs, output: seen["loss"].add(output[0].dtype))


@pytest.mark.parametrize("parallel", ["single", "fsdp"])
@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_what_is_bf16(name: str, parallel: str) -> None:
    state = bf16_state(name, parallel)
    batch = text_like_rows(ROWS, T, SMALL.vocab_size, seed=0)
    gradients = set()
    for parameter in state.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.add(p.grad.dtype))
    with Watch() as watch:
        watch_modules(state.model, watch.seen)
        result = train_step(state, [batch])
    in_bf16, in_fp32 = ("product", "attention", "residual"), ("vector", "attention's gradients", "loss")
    assert watch.seen == dict.fromkeys(in_bf16, BF16) | dict.fromkeys(in_fp32, FP32)
    assert not result.skipped
    assert gradients == FP32
    assert {p.dtype for p in state.model.parameters()} == FP32
    assert {
        state.optimizer.state[p][key].dtype for p in state.model.parameters() for key in ("exp_avg", "exp_avg_sq")
    } == FP32
    assert state.model(batch[0]).dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt", "ngpt"])
def test_layouts_agree_in_bf16(name: str) -> None:
    losses = {}
    for parallel in ("single", "fsdp"):
        state = bf16_state(name, parallel)
        batches = [text_like_rows(ROWS, T, SMALL.vocab_size, seed) for seed in range(3)]
        losses[parallel] = [train_step(state, [batch]).loss.item() for batch in batches]
    assert losses["fsdp"] == pytest.approx(losses["single"], rel=1e-6)


def assert_near(near: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Each gradient to 5 % of its norm."""
    assert near.keys() == exact.keys()
    largest = max(x.norm() for x in exact.values())
    for key, x in exact.items():
        # A gradient that is nothing but rounding is compared on the scale of the others.
        assert (near[key] - x).norm() < 5e-2 * x.norm().clamp(min=1e-3 * largest), key


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bf16_is_near_fp32(name: str) -> None:
    """The same weights: logits to 1 %, each gradient to 5 % of its norm. Caught: a hidden state of fp8."""
    batch = random_batch(ARCHITECTURES[name], WIDE, 4, 64)
    logits, gradients = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config(ARCHITECTURES[name], WIDE))
        model.compute_dtype = dtype
        with torch.no_grad():
            logits.append(model(batch[0]))
        model.loss(*batch)[0].backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    (exact_logits, near_logits), (exact, near) = logits, gradients
    assert (near_logits - exact_logits).norm() < 1e-2 * exact_logits.norm()
    assert not torch.equal(near_logits, exact_logits), "nothing was computed in bf16"
    assert_near(near, exact)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "torch") for name in ("gpt", "ngpt", "normformer", "powernorm", "ntransformer")),
        ("gpt", "triton"),
        ("ngpt", "triton"),
    ],
)
def test_compiled_bf16_stays_near_over_24_blocks(name: str, kernels: str) -> None:
    """Inductor keeps in fp32 what eager rounds between operations, block after block: logits and each gradient to 5 %,
    loss to 1e-2.

    Caught: a norm that takes another path when it is compiled; an operation of ours whose output or gradient the
    compiler takes for another's.
    """
    size = replace(WIDE, n_layers=24, n_encoder_layers=24)
    # Triton's interpreter takes its time for every token.
    batch = random_batch(ARCHITECTURES[name], size, *((4, 64) if kernels == "torch" else (1, 8)))
    logits, losses, gradients = [], [], []
    for compiled in (False, True):
        model = build_model(config(ARCHITECTURES[name], size))
        model.compute_dtype = torch.bfloat16
        torch.compiler.reset()
        counters.clear()
        for block in model.blocks():
            if compiled:
                block.compile(dynamic=False)
        with chosen(kernels):
            loss, n_tokens = model.loss(*batch)
            loss.backward()
            with torch.no_grad():
                logits.append(model.eval()(batch[0]))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
        losses.append(loss.item() / int(n_tokens))
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)
    assert (logits[1] - logits[0]).norm() < 5e-2 * logits[0].norm()
    assert_near(gradients[1], gradients[0])


@pytest.mark.parametrize(
    ("device", "has", "said"),
    [
        ("cuda", {}, "a GPU"),
        ("cpu", {"avx512_bf16": True}, "train.precision=bf16 may be faster"),
        ("cpu", {"amx_bf16": False}, "a CPU$"),
        ("cpu", None, "a CPU$"),
    ],
)
def test_why_auto(device: str, has: dict[str, bool] | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: bf16 recommended where a CPU emulates it; a torch without capabilities that ends the run."""
    if has is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    assert re.search(said, why_precision(device))
