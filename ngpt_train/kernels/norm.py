"""Norm(x) = x / ||x||, nGPT's normalisation: without gain; a smallest length, or eps, keeps it finite."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Shorter vectors are divided by this length, so that Norm(0) = 0 and its gradient is finite.
SHORTEST = 1e-12


def normalize(x: Tensor, eps: float = 0.0) -> Tensor:
    """Norm(x) = x / max(||x||, 1e-12) over the last dimension; computed and returned in at least fp32.

    With eps Norm(x) = x / sqrt(||x||^2 + eps), which is shorter than 1.
    """
    x = at_least_fp32(x)
    if eps:
        return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
    return F.normalize(x, dim=-1, eps=SHORTEST)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in at least fp32: bf16 and fp16 are cast to fp32, fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
