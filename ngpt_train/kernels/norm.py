"""Norm(x) = x / ||x||, nGPT's normalisation: without gain or eps; only the length is bounded from below."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Shorter vectors are divided by this length, so that Norm(0) = 0 and its gradient is finite.
SHORTEST = 1e-12


def normalize(x: Tensor) -> Tensor:
    """Norm(x) = x / max(||x||, 1e-12) over the last dimension; computed and returned in at least fp32."""
    return F.normalize(at_least_fp32(x), dim=-1, eps=SHORTEST)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in at least fp32: bf16 and fp16 are cast to fp32, fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
