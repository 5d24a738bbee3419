"""From a matrix as it is stored to the one that is multiplied by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ngpt_train.models.layers.norms import normalize

# Of a module: parameters that hold several, one below the other, with the names and rows of these.
Stacked = dict[str, dict[str, int]]
InUse = Callable[[Tensor, torch.dtype], Tensor]  # (stored matrix, dtype of the product) -> matrix in use
# An attribute of matrices during a step: the same in another dtype, which optim/working_copies.py keeps up to date.
WORKING_COPY = "working_copy"


def as_stored(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    copy: Tensor | None = getattr(matrix, WORKING_COPY, None)
    return matrix.to(dtype) if copy is None or copy.dtype != dtype else _Copied.apply(matrix, copy)


class _Copied(torch.autograd.Function):
    """What `matrix.to(copy.dtype)` would give, from a copy that there is already; its gradient is `.to`'s."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = matrix.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast_at_use(model: nn.Module) -> list[nn.Parameter]:
    """The matrices that `as_stored` is asked for."""
    modules = (module for module in model.modules() if getattr(module, "in_use", None) is as_stored)
    return [p for module in modules for p in module.parameters(recurse=False) if p.ndim == 2]


def unit_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight parametrization: the rows' directions count, and their gradient is tangent to the sphere."""
    return normalize(matrix).to(dtype)
