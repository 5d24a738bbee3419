"""RMSNorm, LayerNorm, and the projection onto the unit hypersphere of nGPT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ngpt_train.kernels.norm import SHORTEST, normalize

__all__ = ["LayerNorm", "RMSNorm", "normalize", "normalize_rows_"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension; statistics in fp32 (fp64 for fp64 input)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.gain.dtype), self.gain.shape, self.gain, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * gain + bias over the last dimension; statistics as in RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.gain.dtype), self.gain.shape, self.gain, self.bias, self.eps).to(x.dtype)


@torch.no_grad()
def normalize_rows_(matrix: Tensor, skipped: Tensor | None = None) -> None:
    """Divides every row of `matrix` `(rows, d_model)` by its length, in place.

    skipped: 0-dim bool; if it is true, no bit of the matrix changes. FSDP2 shards by whole rows, so each rank
    normalises the rows of its own shard, without communication.
    """
    rows = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min_(SHORTEST)
    # A skipped step divides by 1: dividing a row of length 1 by its computed length could change it by a rounding.
    rows.div_(length if skipped is None else length.masked_fill_(skipped, 1.0))
