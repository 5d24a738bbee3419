"""From a matrix as it is stored to the one that is multiplied by."""

from collections.abc import Callable

import torch
from torch import Tensor

from ngpt_train.models.layers.norms import normalize

# Of a module: parameters that hold several, one below the other, with the names and rows of these.
Stacked = dict[str, dict[str, int]]
InUse = Callable[[Tensor, torch.dtype], Tensor]  # (stored matrix, dtype of the product) -> matrix in use


def as_stored(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.to(dtype)


def unit_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight parametrization: the rows' directions count, and their gradient is tangent to the sphere."""
    return normalize(matrix).to(dtype)
