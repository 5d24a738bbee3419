"""SwiGLU with nGPT's scale vectors or without, and its gradients by hand.

y = (s_u u) * SiLU(x), x = s_v v, SiLU(x) = x sigma(x): eq. 18, 20 and 21 of nGPT, where s_v here is the paper's
s_v sqrt(d_model); GPT has no scale vectors. u and v are the two halves of uv, the result of one matrix product. With
g = dL/dy:

    du  = g s_u SiLU(x)                                     ds_u = sum_tokens g u SiLU(x)
    dx  = g s_u u (sigma(x) + SiLU(x) (1 - sigma(x)))
    dv  = dx s_v                                            ds_v = sum_tokens dx v

The Triton kernel reads uv and writes y; its backward pass reads uv and g and writes d_uv. Only arguments are kept.

A product whose outputs are scaled is also the product with a matrix whose rows are scaled: s (W x) = (s W) x. Where a
batch has more tokens than d_model, W has fewer elements than W x, so it is cheaper to scale W:

    y = (s W) x,    dx = (s W)^T dy,    dW = s (dy x^T),    ds = rowsum((dy x^T) W)

On a CPU this is done in half precision too, though s W is rounded once more than W x: W is cast before it is scaled,
because FSDP2 gathers it cast, and one process has the same losses. GPUs scale u and v.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.kernels.dispatch import operation, runs_on_triton
from ngpt_train.kernels.norm import at_least_fp32, on_cpu


@operation("swiglu")
def swiglu(
    uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None, silu: Callable[[Tensor], Tensor] = F.silu
) -> Tensor:
    """(s_u u) * SiLU(s_v v): uv `(..., 2 m)` = [u, v] -> `(..., m)` in uv's dtype, computed in at least fp32.

    s_u, s_v: `(m,)` fp32, both or neither; None is 1. silu: SiLU. Raises ValueError for other shapes.
    """
    u, v = at_least_fp32(uv).chunk(2, dim=-1)
    if s_u is not None and s_v is not None:
        u, v = s_u * u, s_v * v  # eq. 20 and 21 of nGPT
    return (u * silu(v)).to(uv.dtype)  # eq. 18


def check(uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> None:
    m = uv.shape[-1] // 2
    if uv.shape[-1] % 2:
        raise ValueError(f"swiglu: uv holds u and v side by side, but has an odd number of columns, {uv.shape[-1]}")
    if (s_u is None) != (s_v is None):
        raise ValueError("swiglu: s_u and s_v come together")
    if s_u is not None and s_v is not None and (s_u.shape != (m,) or s_v.shape != (m,)):
        raise ValueError(f"swiglu: s_u {tuple(s_u.shape)} and s_v {tuple(s_v.shape)} must have shape ({m},)")


@swiglu.twin
def by_hand_or_on_triton(on_triton: bool, uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> Tensor:
    check(uv, s_u, s_v)
    if torch.compiler.is_compiling() and not on_triton:  # it fuses the formula by itself
        return cast(Tensor, swiglu.formula(uv, s_u, s_v))
    return _SwiGLU.apply(uv, s_u, s_v, on_triton)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU by hand or on Triton. It keeps only its arguments for the backward pass, and on CPUs SiLU(x) if no cast is
    needed: in half precision all factors would be kept in fp32."""

    @staticmethod
    def forward(ctx: Any, uv: Tensor, s_u: Tensor | None, s_v: Tensor | None, on_triton: bool) -> Tensor:
        ctx.on_triton = on_triton
        if on_triton:
            from ngpt_train.kernels.gpu.swiglu import swiglu_forward

            ctx.save_for_backward(uv, s_u, s_v)
            return swiglu_forward(uv, s_u, s_v)
        silus = []

        def silu(x: Tensor) -> Tensor:
            silus.append(F.silu(x))
            return silus[-1]

        y = swiglu.formula(uv, s_u, s_v, silu)
        ctx.save_for_backward(uv, s_u, s_v, *silus if silus[-1].dtype == uv.dtype else ())
        return cast(Tensor, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        uv, s_u, s_v, *silu = ctx.saved_tensors
        if not ctx.on_triton:
            return *backward_by_hand(dy, uv, s_u, s_v, *silu), None
        from ngpt_train.kernels.gpu.swiglu import swiglu_backward

        d_uv, d_s = swiglu_backward(dy, uv, s_u, s_v)
        return (d_uv, None, None, None) if s_u is None else (d_uv, d_s[0], d_s[1], None)


def backward_by_hand(
    dy: Tensor, uv: Tensor, s_u: Tensor | None, s_v: Tensor | None, silu: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d_uv `(..., 2 m)` in uv's dtype; ds_u and ds_v `(m,)` in at least fp32, None without scale vectors. silu: SiLU(x)
    `(..., m)`, if it was kept."""
    u, v = at_least_fp32(uv).chunk(2, dim=-1)
    x = v if s_v is None else s_v * v
    silu = F.silu(x) if silu is None else silu
    g, d_uv = dy.to(u.dtype), torch.empty_like(uv)
    d_u, d_v = d_uv.chunk(2, dim=-1)
    if s_u is None or s_v is None:
        torch.mul(g, silu, out=d_u)
        torch.ops.aten.silu_backward(g * u, x, grad_input=d_v)
        return d_uv, None, None
    du, dx = g * silu, torch.ops.aten.silu_backward(g * u, x)  # still without the factor s_u
    ds_u = (du * u).flatten(0, -2).sum(0)
    dx *= s_u
    ds_v = (dx * v).flatten(0, -2).sum(0)
    torch.mul(du, s_u, out=d_u)
    torch.mul(dx, s_v, out=d_v)
    return d_uv, ds_u, ds_v


def scaled_swiglu(x: Tensor, w_uv: Tensor, s_u: Tensor, s_v: Tensor) -> Tensor:
    """(s_u u) * SiLU(s_v v), where u and v are the halves of W_uv x.

    x `(..., d_model)`, w_uv `(2 d_mlp, d_model)`, s_u and s_v `(d_mlp,)` -> `(..., d_mlp)` in x's dtype.
    """
    if on_cpu(x) and not runs_on_triton("swiglu", x):
        return swiglu(scaled_linear(x, w_uv, torch.cat([s_u, s_v])))
    return swiglu(F.linear(x, w_uv), s_u, s_v)


def scaled_linear(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """scale * (matrix x): x `(..., d_in)`, matrix `(d_out, d_in)`, scale `(d_out,)` -> `(..., d_out)`."""
    return _ScaledLinear.apply(x, matrix, scale)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        # Backward computes s W again: keeping it would take as much memory as all weights.
        ctx.save_for_backward(x, matrix, scale)
        return F.linear(x, (scale[:, None] * matrix).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, matrix, scale = ctx.saved_tensors
        dx = dy @ (scale[:, None] * matrix).to(dy.dtype)
        product = at_least_fp32(dy.flatten(0, -2).T @ x.flatten(0, -2))
        dscale = (product * matrix).sum(1)
        return dx, product.mul_(scale[:, None]).to(matrix.dtype), dscale
