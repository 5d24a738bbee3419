"""Rotary positions of q and k, with nGPT's normalisation of each head and s_qk; gradients by hand.

q' = t Norm(R q), k' = Norm(R k): eq. 15 and 16 of nGPT with t = s_qk^2: attention sees only the product q' k', so both
factors s_qk may go to q. R rotates pairs of dimensions by the angle of the token's position, and
Norm(x) = x / max(||x||, 1e-12). GPT has neither Norm nor t. With p = R q, r = 1 / max(||p||, 1e-12), n = r p and
g = dL/dq':

    dt = sum_tokens g n                 e = t g
    dp = r (e - n (n . e))              but r e where ||p|| < 1e-12
    dq = R^T dp

and the same for k with t = 1. Only qkv is kept. Backward computes n from it again: q' / t would fail for t near 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ngpt_train.kernels.dispatch import operation
from ngpt_train.kernels.norm import SHORTEST, at_least_fp32, normalize, reciprocal_length

Heads = tuple[Tensor, Tensor, Tensor]  # q (B, T, n_heads, D), k and v (B, S, n_kv_heads, D)


class QKV(NamedTuple):
    """The projections of attention, in heads."""

    q: Tensor  # (B, T, n_heads, D)
    k: Tensor  # (B, S, n_kv_heads, D)
    v: Tensor  # as k
    # (B, T, (n_heads + 2 n_kv_heads) D): the result of one product; q, k and v are its views. None: several products.
    joined: Tensor | None = None

    @classmethod
    def of(cls, joined: Tensor, n_heads: int, n_kv_heads: int) -> "QKV":
        """Views of joined `(B, T, (n_heads + 2 n_kv_heads) D)`: the heads of q, then of k, then of v."""
        sizes = [n_heads, n_kv_heads, n_kv_heads]
        q, k, v = joined.unflatten(-1, (sum(sizes), -1)).split(sizes, dim=2)
        return cls(q, k, v, joined)


class Rope(NamedTuple):
    """cos and sin of the angles, each `(T, 1, D/2)` or `(B, T, 1, D/2)`, and the layout of pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool  # pairs (2i, 2i + 1); else (i, i + D/2), as in Hugging Face's Llama

    def at(self, positions: Tensor) -> "Rope":
        """The angles of positions `(B, T)`, taken from this table of the positions 0, 1, 2, ..."""
        return Rope(self.cos[positions], self.sin[positions], self.interleaved)


def rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """R x: rotates each pair of x `(B, T, H, D)` by its position's angle; the length of x does not change. Without
    rope, x itself: the model has no positions, or has them in the embedding."""
    if rope is None:
        return x
    first, second = pairs(x, rope.interleaved)
    turned = first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin
    return torch.stack(turned, dim=-1).flatten(-2) if rope.interleaved else torch.cat(turned, dim=-1)


Map = Callable[[Tensor], Tensor]


@operation("rotary")
def rotary(
    qkv: QKV,
    rope: Rope | None,
    normalized: bool = False,
    scale: Tensor | None = None,
    norm: Map = normalize,
    turn: Callable[[Tensor, Rope | None], Tensor] = rotate,
) -> Heads:
    """q' `(B, T, n_heads, D)`, k' and v `(B, S, n_kv_heads, D)`, computed in at least fp32; v is qkv's.

    rope: of fp32 angles. normalized: True for q' = t Norm(R q) and k' = Norm(R k), else without Norm. scale: t
    `(n_heads D,)` fp32; None is 1. norm: Norm. turn: R. Raises ValueError for other shapes. The twin returns qkv's
    dtype.
    """
    q, k = turn(qkv.q, rope), turn(qkv.k, rope)
    if normalized:
        q, k = norm(q), norm(k)  # eq. 15 and 16 of nGPT
    if scale is not None:
        q = q * scale.view(q.shape[-2:])  # s_qk of both
    return q, k, qkv.v


@rotary.unsupported
def unsupported(
    qkv: QKV, rope: Rope | None, normalized: bool = False, scale: Tensor | None = None, norm: Map = normalize
) -> str | None:
    """The option that kernel and gradients by hand do not support, for the log; else None."""
    if rope is None:
        return "queries without a rotation, as in cross-attention"
    if qkv.joined is None:
        return "norms of q and k before RoPE (model.qk_norm, model.qkv_norm)"
    return "model.norm_eps" if normalized and norm is not normalize else None


@rotary.twin
def by_hand_or_on_triton(
    on_triton: bool,
    qkv: QKV,
    rope: Rope | None,
    normalized: bool = False,
    scale: Tensor | None = None,
    norm: Map = normalize,
) -> Heads:
    if rope is None or qkv.joined is None or unsupported(qkv, rope, normalized, scale, norm):
        return cast(Heads, rotary.formula(qkv, rope, normalized, scale, norm))
    options = Options(qkv.q.shape[2], qkv.k.shape[2], rope.interleaved, normalized)
    arguments = qkv.joined, rope.cos, rope.sin, scale, options
    check(*arguments)
    if not torch.compiler.is_compiling() or on_triton:
        return _Rotary.apply(*arguments, on_triton)
    if not normalized:
        return in_the_dtype_of_qkv(*arguments)  # torch.compile fuses the formula into few passes by itself
    # torch.compile would keep the rotated heads for the backward pass, beside q' and k', which attention keeps.
    # Computing them again from qkv is no slower.
    again = checkpoint(in_the_dtype_of_qkv, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast(Heads, again)


class Options(NamedTuple):
    """The layout of qkv and its pairs. normalized: q and k are."""

    n_heads: int
    n_kv_heads: int
    interleaved: bool
    normalized: bool


def check(joined: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, options: Options) -> None:
    D = 2 * cos.shape[-1]
    expected = (*joined.shape[:2], (options.n_heads + 2 * options.n_kv_heads) * D)
    if joined.shape != expected:
        raise ValueError(f"rotary: qkv {tuple(joined.shape)} must be {expected}")
    B, T = joined.shape[:2]
    if cos.shape != sin.shape or cos.shape not in ((T, 1, D // 2), (B, T, 1, D // 2)):
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit {B} rows of {T} tokens")
    if scale is not None and scale.shape != (options.n_heads * D,):
        raise ValueError(f"rotary: scale {tuple(scale.shape)} must have shape ({options.n_heads * D},)")


def in_the_dtype_of_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, options: Options, by_hand: bool = False
) -> Heads:
    """The formula, from one tensor qkv to q' and k' in its dtype. by_hand: in fewer passes, without gradients."""
    qkv = QKV.of(joined, options.n_heads, options.n_kv_heads)
    wide = QKV(at_least_fp32(qkv.q), at_least_fp32(qkv.k), qkv.v)
    functions = (normalize_by_hand, rotate_by_hand) if by_hand else ()
    rope = Rope(cos, sin, options.interleaved)
    q, k, v = rotary.formula(wide, rope, options.normalized, scale, *functions)
    return q.to(joined.dtype), k.to(joined.dtype), v


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Views `(..., D/2)` of the first and of the second member of each pair."""
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


class _Rotary(torch.autograd.Function):
    """By the kernels of gpu/rotary.py, or else by hand: autograd of the formula keeps, reads and writes far more."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, options: Options, on_triton: bool
    ) -> Heads:
        ctx.save_for_backward(joined, cos, sin, scale)
        ctx.options, ctx.on_triton = options, on_triton
        if not on_triton:
            return in_the_dtype_of_qkv(joined, cos, sin, scale, options, by_hand=True)
        from ngpt_train.kernels.gpu.rotary import rotary_forward

        return *rotary_forward(joined, cos, sin, scale, *options), QKV.of(joined, *options[:2]).v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        joined, cos, sin, scale = ctx.saved_tensors
        if ctx.on_triton:
            from ngpt_train.kernels.gpu.rotary import rotary_backward

            d_joined, d_scale = rotary_backward(dq, dk, dv, joined, cos, sin, scale, *ctx.options)
        else:
            rope = Rope(cos, sin, ctx.options.interleaved)
            d_joined, d_scale = backward_by_hand(dq, dk, dv, joined, rope, scale, ctx.options)
        return d_joined, None, None, None if scale is None else d_scale, None, None


def backward_by_hand(
    dq: Tensor, dk: Tensor, dv: Tensor, joined: Tensor, rope: Rope, scale: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """The gradient of joined, and the gradient of scale `(n_heads D,)`, None without scale.

    dq = r (f - q r^2 (q . f)) with f = R^T (t g): the formula above, with R^T applied to each term. Since q . f =
    p . (t g), the product n g gives both dt and n . e.
    """
    d_joined, d_scale = torch.empty(joined.shape, dtype=joined.dtype, device=joined.device), None
    d_q, d_k, d_v, _ = QKV.of(d_joined, *options[:2])
    q, k, *_ = QKV.of(joined, *options[:2])
    d_v.copy_(dv)
    for x, dx, g, t in ((q, d_q, at_least_fp32(dq), scale), (k, d_k, at_least_fp32(dk), None)):
        if options.normalized or t is not None:
            x = at_least_fp32(x)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True) if options.normalized else None  # ||q|| = ||p||
        r = None if norm is None else norm.clamp_min(SHORTEST).reciprocal_()  # (B, T, H, 1)
        radial = None  # n . e
        if t is None:
            f = rotate_by_hand(g, rope, back=True, out=dx if r is None and dx.dtype == g.dtype else None)
            if r is not None:
                radial = (x * f).sum(-1, keepdim=True).mul_(r)
        else:
            t = t.view(options.n_heads, -1)
            ng = rotate_by_hand(x, rope).mul_(g)
            if r is not None:
                ng.mul_(r)
            d_scale = ng.sum((0, 1)).flatten()
            radial = ng.mul_(t).sum(-1, keepdim=True)
            e = torch.mul(g, t, out=ng)  # in the memory of ng, which is no longer needed
            f = rotate_by_hand(e, rope, back=True)
        if norm is None or r is None or radial is None:
            if f is not dx:
                dx.copy_(f)
        else:
            radial.mul_(-r.square()).masked_fill_(norm < SHORTEST, 0)
            torch.addcmul(f.mul_(r), x, radial, out=dx)
    return d_joined, d_scale


def rotate_by_hand(x: Tensor, rope: Rope, back: bool = False, out: Tensor | None = None) -> Tensor:
    """R x, or R^T x if back, of x `(B, T, H, D)`, written into `out`; by default a new, contiguous tensor."""
    cos, sin, interleaved = rope
    cos_of_both = cos.repeat_interleave(2, dim=-1) if interleaved else torch.cat([cos, cos], dim=-1)  # (..., 1, D)
    y = torch.mul(x, cos_of_both, out=torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out)
    (first, second), (y_first, y_second) = pairs(x, interleaved), pairs(y, interleaved)
    y_first.addcmul_(second, sin, value=1 if back else -1)
    y_second.addcmul_(first, sin, value=-1 if back else 1)
    return y


def normalize_by_hand(x: Tensor) -> Tensor:
    """Norm(x) in the place of x, with one division a head."""
    return x.mul_(reciprocal_length(x))
