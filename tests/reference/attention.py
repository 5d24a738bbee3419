"""Causal multi-head attention with rotary positions (eqs. 13-14 of the nGPT paper), the softmax written out."""

import math

import torch
from torch import Tensor


def positions_in(doc_ids: Tensor) -> Tensor:
    """(B, T): how many tokens of its own document precede each token; doc_ids do not decrease, and end with -1."""
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    return same.tril(-1).sum(-1)


def rope(x: Tensor, base: float, layout: str = "half", doc_ids: Tensor | None = None) -> Tensor:
    """Turn the i-th pair of position t by the angle t * base^(-2i/d_k). `x`: (B, H, T, d_k); t is 0 where a document
    begins.

    The i-th pair is (i, i + d_k/2) in the layout half, (2i, 2i + 1) in the layout interleaved.
    """
    t, d_k = x.shape[-2:]
    # Angles in fp64 whatever x is: rounding them to fp32 first would be an error of the reference.
    frequency = base ** (-2 * torch.arange(d_k // 2, dtype=torch.float64) / d_k)
    positions = torch.arange(t) if doc_ids is None else positions_in(doc_ids)[:, None]
    angle = positions[..., None] * frequency  # (T, d_k / 2), or (B, 1, T, d_k / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    pairs = {
        "half": (slice(None, d_k // 2), slice(d_k // 2, None)),
        "interleaved": (slice(0, None, 2), slice(1, None, 2)),
    }
    first, second = pairs[layout]
    a, b = x[..., first], x[..., second]
    turned = torch.empty_like(x)
    turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
    return turned


def split_heads(x: Tensor, d_k: int) -> Tensor:
    """(B, T, heads * d_k) -> (B, heads, T, d_k)."""
    return x.unflatten(-1, (-1, d_k)).transpose(1, 2)


def causal(t: int, doc_ids: Tensor | None) -> Tensor:
    """(1 or B, T, T): each of t tokens sees itself and what precedes it in its document."""
    visible = torch.ones(1, t, t, dtype=torch.bool).tril()
    return visible if doc_ids is None else visible & (doc_ids[:, :, None] == doc_ids[:, None, :])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """q (B, H, T, d_k), k and v (B, H, S, d_k), visible (1 or B, T, S) -> (B, T, H * d_k)."""
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(~visible[:, None], -math.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return ((p / p.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, doc_ids: Tensor | None) -> Tensor:
    """q, k, v: (B, H, T, d_k) -> (B, T, H * d_k), causal."""
    return attend(q, k, v, scale, causal(q.shape[-2], doc_ids))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal distribution function at x."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy summed over the targets that are not -100."""
    valid = targets != -100
    z = logits[valid]
    top = z.amax(-1, keepdim=True)
    log_z = (z - top).exp().sum(-1).log() + top[:, 0]
    return (log_z - z.gather(1, targets[valid][:, None])[:, 0]).sum()
