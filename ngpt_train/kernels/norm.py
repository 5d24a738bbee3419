"""Norm(x) = x / ||x||, kept finite by a smallest length or eps; RMSNorm with its gradients by hand; and constraints of
matrices' rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.core.constants import Constraint

# A shorter vector is divided by this length, so that Norm(0) = 0 and its gradient is finite.
SHORTEST = 1e-12

# Where a step leaves a row w of a matrix: anywhere, at length 1, or at length 1 at most.
# The projection is w / max(||w||, floor).
FLOORS: dict[Constraint, float] = {"sphere": SHORTEST, "ball": 1.0}


def normalize(x: Tensor, eps: float = 0.0) -> Tensor:
    """Norm(x) = x / max(||x||, 1e-12) over the last dimension; computed and returned in at least fp32.

    With eps Norm(x) = x / sqrt(||x||^2 + eps), which is shorter than 1.
    """
    x = at_least_fp32(x)
    if eps:
        return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
    return F.normalize(x, dim=-1, eps=SHORTEST)


def reciprocal_length(x: Tensor) -> Tensor:
    """1 / max(||x||, 1e-12) over the last dimension: x `(..., D)` -> `(..., 1)`, a new tensor.

    A product with it is Norm(x) with one division a vector; F.normalize divides each element. Last digits differ.
    """
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(SHORTEST).reciprocal_()


def at_least_fp32(x: Tensor) -> Tensor:
    """x in at least fp32: bf16 and fp16 are cast to fp32, fp64 stays fp64."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype, without a cast to the same dtype: it returns its input, and for such an operation torch 2.11 compiles
    no gradient by hand."""
    return x if x.dtype == dtype else x.to(dtype)


def on_cpu(x: Tensor) -> bool:
    """True on a CPU, and without memory, where `plan` counts what a pass holds on a CPU."""
    return x.device.type in ("cpu", "meta")


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """g x / sqrt(mean(x^2) + eps) over the last dimension: x `(..., D)` in at least fp32, gain g `(D,)`; None is 1."""
    if on_cpu(x) and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, gain, eps)
    return F.rms_norm(x, x.shape[-1:], gain, eps)


class _RMSNorm(torch.autograd.Function):
    """torch's RMSNorm to the bit, in fewer passes, keeping what torch's kernel keeps on a GPU. On CPUs torch has the
    formula alone: it keeps n too, and its gradient of x^2 copies x. With r = 1 / sqrt(mean(x^2) + eps), n = r x and
    e = g dL/dy:

        dg = sum_tokens n dL/dy,    dx = r e - x r^3 mean(e x)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        r = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, gain, r)
        n = x * r
        return n if gain is None else n.mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, gain, r = ctx.saved_tensors
        e = dy if gain is None else dy * gain
        along = torch.mul(e, x)
        dr = along.sum(-1, keepdim=True)
        torch.mul(x, dr.mul_(-0.5).mul_(r.pow(3)).div_(x.shape[-1]).mul_(2), out=along)
        dx = torch.mul(e, r, out=None if gain is None else e).add_(along)
        dgain = None if gain is None else torch.mul(x, r, out=along).mul_(dy).flatten(0, -2).sum(0)
        return dx, dgain, None
