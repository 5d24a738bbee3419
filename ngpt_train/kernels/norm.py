"""Norm(x) = x / ||x||, nGPT's normalisation: no gain, and no eps but a bound on the length."""

import torch
import torch.nn.functional as F
from torch import Tensor

# A length below it counts as it, so that a row of zeros has neither a direction nor an infinite gradient.
SHORTEST = 1e-12


def normalize(x: Tensor) -> Tensor:
    """Norm(x) = x / max(||x||, 1e-12) over the last dimension, at least in fp32 (returned so)."""
    return F.normalize(wide(x), dim=-1, eps=SHORTEST)


def wide(x: Tensor) -> Tensor:
    """x in at least fp32: fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
