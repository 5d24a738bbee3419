"""Times causal attention with nGPT's softmax scale, by each implementation beside the one that torch picks by itself.
Needs torch alone.

    python -m benchmarks.attention [--tokens 4096,1024,8192] [--device cpu] [--out FILE]

    whole rows     torch's scaled_dot_product_attention by each of its backends; torch's varlen and flex_attention, on
                   rows of one document
    documents      varlen and flex_attention, on rows of documents of random length

A forward pass keeps what the backward pass needs, as in training. FLOPs are those of the scores that are not masked,
n^2 / 2 of a document of n tokens: 4 H D for each score forward, and 2.5 times as many backward.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import Entry, Run, default_device, interleaved, main, on_device
from ngpt_train.kernels.attention import Mask, attention, sdpa, torch_varlen
from ngpt_train.models.layers.documents import document_blocks, packed

Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, T, H, D) -> y (B, T, H, D)
TOKENS = {"cuda": "4096,1024,8192", "cpu": "256"}
SHAPES = {"cuda": (8, 16, 64), "cpu": (2, 6, 64)}  # rows B, heads H, size D of a head
ROUNDS = 10
PICKED = "as torch picks"  # names of implementations
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MATH_TOKENS = 2048  # longer rows need too much memory, because this backend keeps all scores
DOCUMENTS_PER_TOKEN = 1 / 1024


def bench(tokens: str, device: str) -> Iterator[Entry]:
    """For each number of tokens and each implementation that runs here, entries of the forward pass and of both."""
    on = torch.device(device)
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    B, H, D = SHAPES[on.type]
    for T in map(int, (tokens or TOKENS[on.type]).split(",")):
        q, k, v, dy = (torch.randn(B, T, H, D, device=on).to(dtype) for _ in range(4))
        qkv = [F.normalize(q, dim=-1).requires_grad_(), F.normalize(k, dim=-1).requires_grad_(), v.requires_grad_()]
        print(f"attention, {T} tokens: torch picks {torch_choice(*qkv)}", flush=True)
        doc_ids = documents(B, T, on)
        usable = {name: x for name, x in implementations(doc_ids).items() if runs_here(name, x, qkv)}
        lengths_of = {name: lengths(doc_ids) if name.startswith("documents, ") else [T] * B for name in usable}
        for label, backward in (("forward", False), ("forward and backward", True)):
            calls = {}
            for name, implementation in usable.items():
                flops = 4.0 * H * D * sum(n * n / 2 for n in lengths_of[name])
                calls[name] = call(implementation, qkv, dy if backward else None, (3.5 if backward else 1) * flops)
            of = f"attention, {T} tokens, {label}: "
            for entry in interleaved(calls, PICKED, ROUNDS, "FLOP", on_device(on), of):
                mean = B * T / len(lengths_of[entry.name.removeprefix(of)])
                yield replace(entry, more={"document_tokens": mean})


def implementations(doc_ids: Tensor) -> dict[str, Implementation]:
    """All implementations by name, whether they run here or not.

    doc_ids `(B, T)`: the documents of those whose name begins with "documents, ".
    """
    found = {PICKED: by_sdpa(list(BACKENDS.values()))}
    found |= {name: by_sdpa([x]) for name, x in BACKENDS.items() if name != "math" or doc_ids.shape[1] <= MATH_TOKENS}
    for prefix, ids in (("", torch.zeros_like(doc_ids)), ("documents, ", doc_ids)):
        found[f"{prefix}torch's varlen"] = by_mask(partial(packed, ids, torch_varlen))
        found[f"{prefix}flex"] = by_mask(partial(document_blocks, ids))
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
    except (AttributeError, TypeError, ValueError) as error:  # a private function, which other torches may lack
        return f"a backend that it does not tell ({error})"


def runs_here(name: str, implementation: Implementation, qkv: Sequence[Tensor]) -> bool:
    """Whether its forward and backward pass run on this device; says why not, if not."""
    try:
        call(implementation, qkv, torch.ones_like(qkv[0]), 0)()
    except Exception as error:  # each implementation has errors of its own
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 160)
        print(f"{name} does not run here: {reason}", flush=True)
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


if __name__ == "__main__":
    sys.exit(main(__doc__, bench, overrides=False, tokens="", device=default_device()))
