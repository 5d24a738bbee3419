"""Causal attention with nGPT's softmax scale: what torch picks by itself, beside each way that there is.

    whole rows     torch's scaled_dot_product_attention by each of its backends; torch's varlen, flex_attention and the
                   package flash-attn, on rows of one document
    documents      varlen, flex_attention and flash-attn's varlen, on rows of documents of random length

Gradients are asked for in every forward pass, as in training. FLOPs count the scores that are not masked, half of the
square of each document: 4 H D for each of them forward, and 2.5 times that backward.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ngpt_train.bench.device_time import on_device
from ngpt_train.bench.interleaved import Entry, Run, by, interleaved
from ngpt_train.kernels import flash
from ngpt_train.kernels.attention import Mask, attention, sdpa, torch_varlen
from ngpt_train.models.layers.documents import document_blocks, packed

Shape = tuple[int, int, int, int]  # rows B, heads H, tokens T, size D of a head
Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, T, H, D) -> the same
ON_GPU: list[Shape] = [(8, 16, 4096, 64), (8, 16, 1024, 64), (8, 16, 8192, 64)]
ON_CPU: list[Shape] = [(2, 6, 256, 64)]
PICKED = "as torch picks"
COMPILED = "flex"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_TOKENS = 2048  # it keeps all scores
DOCUMENTS_PER_TOKEN = 1 / 1024


def bench(
    device: torch.device,
    shapes: Sequence[Shape],
    rounds: int,
    say: Callable[[str], None] = print,
    compiled_until: float = math.inf,
) -> Iterator[Entry]:
    """Entries of the forward pass and of both, for each shape and way that runs here. compiled_until: of
    time.monotonic; what takes long to compile is left out later."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measure = on_device if device.type == "cuda" else by(time.process_time)
    for B, H, T, D in shapes:
        q, k, v, dy = (torch.randn(B, T, H, D, device=device).to(dtype) for _ in range(4))
        qkv = [F.normalize(q, dim=-1).requires_grad_(), F.normalize(k, dim=-1).requires_grad_(), v.requires_grad_()]
        say(f"attention, {T} tokens: torch picks {picked(*qkv)}")
        doc_ids = documents(B, T, device)
        ways = {}
        for name, way in ways_of(doc_ids, D, dtype, say).items():
            if name.endswith(COMPILED) and time.monotonic() > compiled_until:
                say(f"attention, {T} tokens: {name} skipped (budget)")
            elif works(name, way, qkv, T, say):
                ways[name] = way
        documents_of = {name: lengths(doc_ids) if name.startswith("documents, ") else [T] * B for name in ways}
        for label, backward in (("forward", False), ("forward and backward", True)):
            calls = {}
            for name, way in ways.items():
                flops = 4.0 * H * D * sum(n * n / 2 for n in documents_of[name])
                calls[name] = call(way, qkv, dy if backward else None, (3.5 if backward else 1) * flops)
            for entry in interleaved(calls, PICKED, rounds, "FLOP", measure):
                row = f"attention, {T} tokens, {label}"
                yield replace(
                    entry,
                    name=f"{row}: {entry.name}",
                    relative_to=f"{row}: {PICKED}",
                    document_tokens=B * T / len(documents_of[entry.name]),
                )


def ways_of(doc_ids: Tensor, d_head: int, dtype: torch.dtype, say: Callable[[str], None]) -> dict[str, Way]:
    """By name, whether they run here or not."""
    T, device = doc_ids.shape[1], doc_ids.device
    ways = {PICKED: by_sdpa(list(BACKENDS.values()))}
    ways |= {name: by_sdpa([backend]) for name, backend in BACKENDS.items() if name != "math" or T <= MATH_TOKENS}
    for prefix, ids in (("", torch.zeros_like(doc_ids)), ("documents, ", doc_ids)):
        ways[f"{prefix}torch's varlen"] = by_mask(partial(packed, ids, torch_varlen))
        ways[f"{prefix}{COMPILED}"] = by_mask(partial(document_blocks, ids))
    try:
        installed = flash.find(device, d_head, dtype)
    except flash.NoKernel as error:
        say(f"attention, {T} tokens: flash-attn does not run here: {error}")
    else:
        ways[f"flash-attn {installed.version}"] = lambda q, k, v: installed.dense(q, k, v, scale_of(q), True)
        ways[f"documents, flash-attn {installed.version}"] = by_mask(partial(packed, doc_ids, installed.varlen))
    return ways


def by_sdpa(backends: list[SDPBackend]) -> Way:
    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return sdpa(q, k, v, scale_of(q), True, None)

    return way


def by_mask(make: Callable[[], Mask]) -> Way:
    """The mask is made when it is first needed: what cannot run here may not have one."""
    made: list[Mask] = []

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made.append(make())
        return attention(q, k, v, scale_of(q), True, made[0])

    return way


def scale_of(q: Tensor) -> float:
    return math.sqrt(q.shape[-1])


def documents(B: int, T: int, device: torch.device) -> Tensor:
    """doc_ids `(B, T)`: each token begins one with the same probability, so that their mean length is 1024 in rows much
    longer than that."""
    begins = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < DOCUMENTS_PER_TOKEN
    return begins.cumsum(1).to(device)


def lengths(doc_ids: Tensor) -> list[int]:
    """Of the documents of all rows."""
    return [int(n) for row in doc_ids.cpu() for n in row.unique_consecutive(return_counts=True)[1]]


def picked(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend that torch's scaled_dot_product_attention takes for these."""
    try:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, scale=math.sqrt(q.shape[-1]))).name
    except (AttributeError, TypeError, ValueError) as error:  # it is not torch's public interface
        return f"a backend that it does not tell ({error})"


def works(name: str, way: Way, qkv: Sequence[Tensor], T: int, say: Callable[[str], None]) -> bool:
    """Whether both passes run here; if not, says why."""
    try:
        call(way, qkv, torch.ones_like(qkv[0]), 0)()
    except Exception as error:  # each has errors of its own
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 160)
        say(f"attention, {T} tokens: {name} does not run here: {reason}")
        return False
    return True


def call(way: Way, qkv: Sequence[Tensor], gradient: Tensor | None, flops: float) -> Run:
    """With a gradient both passes, without one the forward pass; counts as `flops`."""
    q, k, v = qkv

    def run() -> float:
        y = way(q, k, v)
        if gradient is not None:
            torch.autograd.grad(y, qkv, gradient)
        return flops

    return run
