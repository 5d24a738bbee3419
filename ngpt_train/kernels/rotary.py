"""Rotary positions of q and k, with nGPT's normalisation of each head and s_qk; gradients by hand.

q' = t Norm(R q), k' = Norm(R k): eq. 15 and 16 of nGPT with t = s_qk^2: attention sees only the product q' k', so both
factors s_qk may go to q. R rotates pairs of dimensions by the angle of the token's position, and
Norm(x) = x / max(||x||, 1e-12). GPT has neither Norm nor t. With p = R q, r = 1 / max(||p||, 1e-12), n = r p and
g = dL/dq':

    dt = sum_tokens g n                 e = t g
    dp = r (e - n (n . e))              but r e where ||p|| < 1e-12
    dq = R^T dp

and the same for k with t = 1. Of the activations only qkv is kept. Backward computes n from it again; n = q' / t would
fail where t is near 0.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ngpt_train.kernels.norm import SHORTEST, at_least_fp32, normalize
from ngpt_train.kernels.operation import operation

Heads = tuple[Tensor, Tensor, Tensor]  # q (B, T, n_heads, d_head), k and v (B, S, n_kv_heads, d_head)


class RotaryOptions(NamedTuple):
    """The layout of qkv and its pairs, and whether q and k are normalised."""

    n_heads: int
    n_kv_heads: int
    interleaved: bool  # R rotates the pairs (2i, 2i + 1); else (i, i + D/2)
    normalized: bool  # each head of k', and of q' before scale, has length 1


@operation("rotary")
def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, options: RotaryOptions, scale: Tensor | None) -> Heads:
    """q' `(B, T, n_heads, D)`, k' and v `(B, T, n_kv_heads, D)` in qkv's dtype; v is a view of qkv.

    qkv: `(B, T, (n_heads + 2 n_kv_heads) D)`: the heads of q, then of k, then of v.
    cos, sin: fp32, `(T, 1, D/2)`, or `(B, T, 1, D/2)` where the positions of rows differ.
    scale: t `(n_heads D,)` fp32, multiplies q' last; None is 1.
    Computed in at least fp32. Raises ValueError for other shapes.
    """
    n_heads, n_kv_heads, interleaved, normalized = options
    q, k, v = heads_of(qkv, n_heads, n_kv_heads)
    q, k = rotate(at_least_fp32(q), cos, sin, interleaved), rotate(at_least_fp32(k), cos, sin, interleaved)
    if normalized:
        q, k = normalize(q), normalize(k)  # eq. 15 and 16 of nGPT
    if scale is not None:
        q = q * scale.view(n_heads, -1)
    return q.to(qkv.dtype), k.to(qkv.dtype), v


@rotary.check
def check(qkv: Tensor, cos: Tensor, sin: Tensor, options: RotaryOptions, scale: Tensor | None) -> None:
    D = 2 * cos.shape[-1]
    expected = (*qkv.shape[:2], (options.n_heads + 2 * options.n_kv_heads) * D)
    if qkv.shape != expected:
        raise ValueError(f"rotary: qkv {tuple(qkv.shape)} must be {expected}")
    B, T = qkv.shape[:2]
    if cos.shape != sin.shape or cos.shape not in ((T, 1, D // 2), (B, T, 1, D // 2)):
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit {B} rows of {T} tokens")
    if scale is not None and scale.shape != (options.n_heads * D,):
        raise ValueError(f"rotary: scale {tuple(scale.shape)} must have shape ({options.n_heads * D},)")


@rotary.twin
def by_hand_or_on_triton(
    on_triton: bool, qkv: Tensor, cos: Tensor, sin: Tensor, options: RotaryOptions, scale: Tensor | None
) -> Heads:
    if torch.compiler.is_compiling() and not on_triton:  # torch.compile fuses the formula into few passes by itself
        if not options.normalized:
            return cast(Heads, rotary.formula(qkv, cos, sin, options, scale))
        # torch.compile would keep the rotated heads for the backward pass, beside q' and k', which attention keeps.
        # Computing them again from qkv is no slower.
        again = checkpoint(rotary.formula, qkv, cos, sin, options, scale, use_reentrant=False, preserve_rng_state=False)
        return cast(Heads, again)
    return _Rotary.apply(qkv, cos, sin, scale, options, on_triton)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """R x: rotates each pair of x `(B, T, H, D)` by its position's angle; the length of x does not change."""
    first, second = pairs(x, interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def heads_of(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, ...]:
    """Views q `(B, T, n_heads, D)`, k and v `(B, T, n_kv_heads, D)` of qkv."""
    sizes = [n_heads, n_kv_heads, n_kv_heads]
    return qkv.unflatten(-1, (sum(sizes), -1)).split(sizes, dim=2)


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Views `(..., D/2)` of the first and of the second member of each pair."""
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


class _Rotary(torch.autograd.Function):
    """By the kernels of gpu/rotary.py, or else by hand: autograd of the formula keeps, reads and writes far more."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, options: RotaryOptions, on_triton: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, cos, sin, scale)
        ctx.options, ctx.on_triton = options, on_triton
        if on_triton:
            from ngpt_train.kernels.gpu.rotary import rotary_forward

            q, k = rotary_forward(qkv, cos, sin, scale, *options)
        else:
            q, k = forward_by_hand(qkv, cos, sin, scale, *options)
        return q, k, heads_of(qkv, options.n_heads, options.n_kv_heads)[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, scale = ctx.saved_tensors
        if ctx.on_triton:
            from ngpt_train.kernels.gpu.rotary import rotary_backward

            d_qkv, d_scale = rotary_backward(dq, dk, dv, qkv, cos, sin, scale, *ctx.options)
        else:
            d_qkv, d_scale = backward_by_hand(dq, dk, dv, qkv, cos, sin, scale, *ctx.options)
        return d_qkv, None, None, None if scale is None else d_scale, None, None


def forward_by_hand(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None,
    n_heads: int,
    n_kv_heads: int,
    interleaved: bool,
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    """q' and k', contiguous, as `rotary` returns them."""
    q, k, _ = heads_of(at_least_fp32(qkv), n_heads, n_kv_heads)
    q, k = (rotate_by_hand(x, cos, sin, interleaved) for x in (q, k))
    if normalized:
        for x in (q, k):
            x.mul_(reciprocal(norms(x)))
    if scale is not None:
        q.mul_(scale.view(n_heads, -1))
    return q.to(qkv.dtype), k.to(qkv.dtype)


def backward_by_hand(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None,
    n_heads: int,
    n_kv_heads: int,
    interleaved: bool,
    normalized: bool,
) -> tuple[Tensor, Tensor | None]:
    """d_qkv, and the gradient of scale `(n_heads D,)`, None without scale.

    dq = r (f - q r^2 (q . f)) with f = R^T (t g): the formula above, with R^T applied to each term. Since q . f =
    p . (t g), the product n g gives both dt and n . e.
    """
    d_qkv, d_scale = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device), None
    *d_qk, d_v = heads_of(d_qkv, n_heads, n_kv_heads)
    *qk, _ = heads_of(at_least_fp32(qkv), n_heads, n_kv_heads)
    d_v.copy_(dv)
    for x, dx, g, t in zip(qk, d_qk, (at_least_fp32(dq), at_least_fp32(dk)), (scale, None), strict=True):
        norm = norms(x) if normalized else None  # (B, T, H, 1): ||q|| = ||p||
        r = None if norm is None else reciprocal(norm)
        radial = None  # n . e
        if t is None:
            f = rotate_by_hand(g, cos, sin, interleaved, back=True)
            if r is not None:
                radial = (x * f).sum(-1, keepdim=True).mul_(r)
        else:
            t = t.view(n_heads, -1)
            ng = rotate_by_hand(x, cos, sin, interleaved).mul_(g)
            if r is not None:
                ng.mul_(r)
            d_scale = ng.sum((0, 1)).flatten()
            radial = ng.mul_(t).sum(-1, keepdim=True)
            e = torch.mul(g, t, out=ng)  # in the memory of ng, which is no longer needed
            f = rotate_by_hand(e, cos, sin, interleaved, back=True)
        if norm is None or r is None or radial is None:
            dx.copy_(f)
        else:
            radial.mul_(-r.square()).masked_fill_(norm < SHORTEST, 0)
            torch.addcmul(f.mul_(r), x, radial, out=dx)
    return d_qkv, d_scale


def rotate_by_hand(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool = False) -> Tensor:
    """R x, or R^T x if back, of x `(B, T, H, D)`: a new, contiguous tensor of the same shape."""
    cos_of_both = cos.repeat_interleave(2, dim=-1) if interleaved else torch.cat([cos, cos], dim=-1)  # (..., 1, D)
    y = torch.mul(x, cos_of_both, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    (first, second), (y_first, y_second) = pairs(x, interleaved), pairs(y, interleaved)
    y_first.addcmul_(second, sin, value=1 if back else -1)
    y_second.addcmul_(first, sin, value=-1 if back else 1)
    return y


def norms(x: Tensor) -> Tensor:
    """Lengths over the last dimension: x `(..., D)` -> `(..., 1)`."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def reciprocal(norm: Tensor) -> Tensor:
    return norm.clamp_min(SHORTEST).reciprocal_()
