"""Times causal attention with nGPT's softmax scale, by each implementation beside the one that torch picks by itself.

    whole rows     torch's scaled_dot_product_attention by each of its backends; torch's varlen, flex_attention and the
                   package flash-attn, on rows of one document
    documents      varlen, flex_attention and flash-attn's varlen, on rows of documents of random length

A forward pass keeps what the backward pass needs, as in training. FLOPs are those of the scores that are not masked,
n^2 / 2 of a document of n tokens: 4 H D for each score forward, and 2.5 times as many backward.
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
Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, T, H, D) -> y (B, T, H, D)
ON_GPU: list[Shape] = [(8, 16, 4096, 64), (8, 16, 1024, 64), (8, 16, 8192, 64)]
ON_CPU: list[Shape] = [(2, 6, 256, 64)]
PICKED = "as torch picks"  # names of implementations
FLEX = "flex"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_TOKENS = 2048  # longer rows need too much memory, because this backend keeps all scores
DOCUMENTS_PER_TOKEN = 1 / 1024


def bench(
    device: torch.device,
    shapes: Sequence[Shape],
    rounds: int,
    say: Callable[[str], None] = print,
    compiled_until: float = math.inf,
) -> Iterator[Entry]:
    """For each shape and each implementation that runs here, entries of the forward pass and of both passes.

    rounds: timed ones. say: is given lines for the log. compiled_until: a value of time.monotonic(), after which
    flex_attention, which takes long to compile, is skipped.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measure = on_device if device.type == "cuda" else by(time.process_time)
    for B, H, T, D in shapes:
        q, k, v, dy = (torch.randn(B, T, H, D, device=device).to(dtype) for _ in range(4))
        qkv = [F.normalize(q, dim=-1).requires_grad_(), F.normalize(k, dim=-1).requires_grad_(), v.requires_grad_()]
        say(f"attention, {T} tokens: torch picks {torch_choice(*qkv)}")
        doc_ids = documents(B, T, device)
        usable = {}
        for name, implementation in implementations(doc_ids, D, dtype, say).items():
            if name.endswith(FLEX) and time.monotonic() > compiled_until:
                say(f"attention, {T} tokens: {name} skipped (budget)")
            elif runs_here(name, implementation, qkv, T, say):
                usable[name] = implementation
        lengths_of = {name: lengths(doc_ids) if name.startswith("documents, ") else [T] * B for name in usable}
        for label, backward in (("forward", False), ("forward and backward", True)):
            calls = {}
            for name, implementation in usable.items():
                flops = 4.0 * H * D * sum(n * n / 2 for n in lengths_of[name])
                calls[name] = call(implementation, qkv, dy if backward else None, (3.5 if backward else 1) * flops)
            for entry in interleaved(calls, PICKED, rounds, "FLOP", measure):
                row = f"attention, {T} tokens, {label}"
                yield replace(
                    entry,
                    name=f"{row}: {entry.name}",
                    relative_to=f"{row}: {PICKED}",
                    document_tokens=B * T / len(lengths_of[entry.name]),
                )


def implementations(
    doc_ids: Tensor, d_head: int, dtype: torch.dtype, say: Callable[[str], None]
) -> dict[str, Implementation]:
    """All implementations by name, whether they run here or not; flash-attn only where it does.

    doc_ids `(B, T)`: the documents of those whose name begins with "documents, ".
    """
    T, device = doc_ids.shape[1], doc_ids.device
    found = {PICKED: by_sdpa(list(BACKENDS.values()))}
    found |= {name: by_sdpa([backend]) for name, backend in BACKENDS.items() if name != "math" or T <= MATH_TOKENS}
    for prefix, ids in (("", torch.zeros_like(doc_ids)), ("documents, ", doc_ids)):
        found[f"{prefix}torch's varlen"] = by_mask(partial(packed, ids, torch_varlen))
        found[f"{prefix}{FLEX}"] = by_mask(partial(document_blocks, ids))
    try:
        installed = flash.find(device, d_head, dtype)
    except flash.NoKernel as error:
        say(f"attention, {T} tokens: flash-attn does not run here: {error}")
    else:
        found[f"flash-attn {installed.version}"] = lambda q, k, v: installed.dense(q, k, v, scale_of(q), True)
        found[f"documents, flash-attn {installed.version}"] = by_mask(partial(packed, doc_ids, installed.varlen))
    return found


def by_sdpa(backends: list[SDPBackend]) -> Implementation:
    """scaled_dot_product_attention, free to use these backends."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return sdpa(q, k, v, scale_of(q), True, None)

    return run


def by_mask(make: Callable[[], Mask]) -> Implementation:
    """The implementation that `kernels.attention` takes for a mask of this type.

    `make` is called by the first call, where an implementation that is missing here may raise.
    """
    made: list[Mask] = []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made.append(make())
        return attention(q, k, v, scale_of(q), True, made[0])

    return run


def scale_of(q: Tensor) -> float:
    """nGPT's softmax scale, sqrt(d_k)."""
    return math.sqrt(q.shape[-1])


def documents(B: int, T: int, device: torch.device) -> Tensor:
    """Random doc_ids `(B, T)`: each token begins a document with probability 1/1024, and so does each row."""
    begins = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < DOCUMENTS_PER_TOKEN
    return begins.cumsum(1).to(device)


def lengths(doc_ids: Tensor) -> list[int]:
    """The lengths, in tokens, of the documents of all rows. doc_ids `(B, T)`."""
    return [int(n) for row in doc_ids.cpu() for n in row.unique_consecutive(return_counts=True)[1]]


def torch_choice(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend that scaled_dot_product_attention picks by itself for q, k, v `(B, T, H, D)`, in words."""
    try:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, scale=math.sqrt(q.shape[-1]))).name
    except (
        AttributeError,
        TypeError,
        ValueError,
    ) as error:  # a private function, which other versions of torch may lack
        return f"a backend that it does not tell ({error})"


def runs_here(
    name: str, implementation: Implementation, qkv: Sequence[Tensor], T: int, say: Callable[[str], None]
) -> bool:
    """Whether its forward and backward pass run on this device; says why not, if not."""
    try:
        call(implementation, qkv, torch.ones_like(qkv[0]), 0)()
    except Exception as error:  # each implementation has errors of its own
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 160)
        say(f"attention, {T} tokens: {name} does not run here: {reason}")
        return False
    return True


def call(implementation: Implementation, qkv: Sequence[Tensor], gradient: Tensor | None, flops: float) -> Run:
    """A run of the forward pass, or with `gradient`, dL/dy `(B, T, H, D)`, of both passes; it returns `flops`."""
    q, k, v = qkv

    def run() -> float:
        y = implementation(q, k, v)
        if gradient is not None:
            torch.autograd.grad(y, qkv, gradient)
        return flops

    return run
