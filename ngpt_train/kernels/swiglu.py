"""SwiGLU of a packed product, with nGPT's scale vectors or without.

y = (s_u u) * SiLU(x), x = s_v v, SiLU(x) = x sigma(x): eq. 20 and 21 of nGPT, whose sqrt(d_model) s_v is the s_v of
here; GPT has neither vector. u and v are the two halves of uv, which one matrix product makes. With g = dL/dy:

    du  = g s_u SiLU(x)                                     ds_u = sum_tokens g u SiLU(x)
    dx  = g s_u u (sigma(x) + SiLU(x) (1 - sigma(x)))
    dv  = dx s_v                                            ds_v = sum_tokens dx v

The kernel reads uv and writes y; backward it reads uv and g and writes one packed d_uv, and keeps nothing but uv.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.kernels import dispatch


def swiglu(uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> Tensor:
    """(s_u u) * SiLU(s_v v) of uv `(..., 2 m)` = [u, v]: `(..., m)` in uv's dtype, computed at least in fp32.

    s_u, s_v: `(m,)` fp32, both or neither. Raises ValueError for other shapes.
    """
    m, odd = divmod(uv.shape[-1], 2)
    if odd:
        raise ValueError(f"swiglu: uv holds u and v side by side, but has an odd number of columns, {uv.shape[-1]}")
    if (s_u is None) != (s_v is None):
        raise ValueError("swiglu: s_u and s_v come together")
    if s_u is None or s_v is None:
        return SwiGLU.apply(uv, None, None) if dispatch.runs_on_triton("swiglu", uv) else reference(uv)
    if s_u.shape != (m,) or s_v.shape != (m,):
        raise ValueError(f"swiglu: s_u {tuple(s_u.shape)} and s_v {tuple(s_v.shape)} must have shape ({m},)")
    if dispatch.runs_on_triton("swiglu", uv, s_u, s_v):
        return SwiGLU.apply(uv, s_u, s_v)
    return reference(uv, s_u, s_v)


def reference(uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> Tensor:
    """As `swiglu`, in plain PyTorch."""
    u, v = uv.to(torch.promote_types(uv.dtype, torch.float32)).chunk(2, dim=-1)
    if s_u is not None and s_v is not None:
        u, v = s_u * u, s_v * v
    return (u * F.silu(v)).to(uv.dtype)


class SwiGLU(torch.autograd.Function):
    """By the kernels of gpu/swiglu.py."""

    @staticmethod
    def forward(ctx: Any, uv: Tensor, s_u: Tensor | None, s_v: Tensor | None) -> Tensor:
        from ngpt_train.kernels.gpu.swiglu import swiglu_forward

        ctx.save_for_backward(uv, s_u, s_v)
        return swiglu_forward(uv, s_u, s_v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        from ngpt_train.kernels.gpu.swiglu import swiglu_backward

        uv, s_u, s_v = ctx.saved_tensors
        d_uv, d_s = swiglu_backward(dy, uv, s_u, s_v)
        return (d_uv, None, None) if s_u is None else (d_uv, d_s[0], d_s[1])
