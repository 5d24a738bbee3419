"""Matrix products with several named matrices at once: what is stored, what is multiplied by, what it is called."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.norm import normalize


class FusedLinear(nn.Module):
    """y = W x + b, where the rows of W are those of several matrices, one below the other.

    One product is faster than several. `rows` names the matrices and says how many rows `(d_model,)` each has; weights
    are exported under these names, and b, cut like W, under the same with b for w (`w_u`, `b_u`).

    W and b are stored in fp32, and W is cast to the dtype of x at each use, or comes from the optimizer in bf16.
    unit_rows: nGPT's parametrization. The rows' directions count and their gradients are tangent to the sphere.
    """

    def __init__(self, rows: Mapping[str, int], d_model: int, bias: bool = False, unit_rows: bool = False) -> None:
        super().__init__()
        self.rows = dict(rows)
        self.unit_rows = unit_rows
        self.matrix = nn.Parameter(torch.empty(sum(self.rows.values()), d_model))
        self.bias = nn.Parameter(torch.empty(sum(self.bias_rows().values()))) if bias else None
        # W in bf16, there during a step alone: optim/working_copies.py keeps it up to date.
        self.bf16_copy: Tensor | None = None

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def bias_rows(self) -> dict[str, int]:
        """Of the part of b that belongs to each matrix."""
        return {"b" + name.removeprefix("w"): n_rows for name, n_rows in self.rows.items()}

    def parts(self) -> dict[str, dict[str, int]]:
        """For each parameter the names and rows of what lies one below the other in it."""
        return {"matrix": self.rows} if self.bias is None else {"matrix": self.rows, "bias": self.bias_rows()}

    def weight(self, dtype: torch.dtype) -> Tensor:
        """W as it is multiplied by, in the dtype of the product."""
        if self.unit_rows:
            return normalize(self.matrix).to(dtype)
        if self.bf16_copy is not None and dtype == torch.bfloat16:
            return _Copied.apply(self.matrix, self.bf16_copy)
        return self.matrix.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., d_model)` -> `(..., rows)` in x's dtype."""
        return F.linear(x, self.weight(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class OutputLinear(FusedLinear):
    """y = x W + b, for the matrices that write into the residual stream: their rows are points of it, too.

    So rows are what nGPT normalises in every matrix, and FSDP2 shards them whole.
    """

    def bias_rows(self) -> dict[str, int]:
        return {"b" + name.removeprefix("w"): self.matrix.shape[1] for name in self.rows}

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., rows)` -> `(..., d_model)` in x's dtype."""
        y = x @ self.weight(x.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Copied(torch.autograd.Function):
    """What `matrix.to(copy.dtype)` would give, from a copy that there is already; its gradient is `.to`'s."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = matrix.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast_linears(model: nn.Module) -> list[FusedLinear]:
    """Those whose matrix is cast as it is, so that a copy in bf16 spares them the cast."""
    return [module for module in model.modules() if isinstance(module, FusedLinear) and not module.unit_rows]
