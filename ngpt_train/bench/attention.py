"""Causal attention with nGPT's softmax scale: what torch picks by itself, beside each implementation that it has.

FLOPs count the half of the scores that is not masked: 2 B H T^2 D forward, and 2.5 times that backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ngpt_train.bench.device_time import on_device
from ngpt_train.bench.interleaved import Entry, Run, by, interleaved

Shape = tuple[int, int, int, int]  # rows B, heads H, tokens T, size D of a head
ON_GPU: list[Shape] = [(8, 16, 1024, 64), (8, 16, 4096, 64), (8, 16, 8192, 64)]
ON_CPU: list[Shape] = [(2, 6, 256, 64)]
PICKED = "as torch picks"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_TOKENS = 2048  # it keeps all scores


def bench(
    device: torch.device, shapes: Sequence[Shape], rounds: int, say: Callable[[str], None] = print
) -> Iterator[Entry]:
    """Entries of the forward pass and of both, for each shape and implementation that runs here."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measure = on_device if device.type == "cuda" else by(time.process_time)
    for B, H, T, D in shapes:
        # (B, T, H, D) in memory, as the model has it.
        q, k, v, dy = (torch.randn(B, T, H, D, device=device).to(dtype).transpose(1, 2) for _ in range(4))
        qkv = [F.normalize(q, dim=-1).requires_grad_(), F.normalize(k, dim=-1).requires_grad_(), v.requires_grad_()]
        allowed = {PICKED: list(BACKENDS.values())} | {name: [backend] for name, backend in BACKENDS.items()}
        if T > MATH_TOKENS:
            del allowed["math"]
        for name, backends in list(allowed.items()):
            if (reason := why_not(backends, qkv)) is not None:
                say(f"attention, {T} tokens: {name} does not run here: {reason}")
                del allowed[name]
        forward_flops = 2.0 * B * H * T * T * D
        for label, factor in (("forward", 1.0), ("forward and backward", 3.5)):
            gradient = dy if factor > 1 else None
            runs = {
                name: attention(backends, qkv, gradient, factor * forward_flops) for name, backends in allowed.items()
            }
            for entry in interleaved(runs, PICKED, rounds, "FLOP", measure):
                row = f"attention, {T} tokens, {label}"
                yield replace(entry, name=f"{row}: {entry.name}", relative_to=f"{row}: {PICKED}")


def why_not(backends: list[SDPBackend], qkv: Sequence[Tensor]) -> str | None:
    """What torch says where none of `backends` takes these tensors."""
    try:
        attention(backends, qkv, torch.ones_like(qkv[0]), 0)()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def attention(backends: list[SDPBackend], qkv: Sequence[Tensor], gradient: Tensor | None, flops: float) -> Run:
    """With a gradient both passes, without one the forward pass; counts as `flops`."""
    q, k, v = qkv

    def run() -> float:
        with sdpa_kernel(backends), torch.set_grad_enabled(gradient is not None):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(q.shape[-1]))
        if gradient is not None:
            torch.autograd.grad(y, qkv, gradient)
        return flops

    return run
