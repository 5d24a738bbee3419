"""Norm(x) = x / ||x|| without gain, kept finite by a smallest length or eps; and constraints of matrices' rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
