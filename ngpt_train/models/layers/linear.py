"""Linear layers of several named matrices in one product: storage, cast, parametrization and names of the weights."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.norm import normalize


class FusedLinear(nn.Module):
    """y = W x + b, where W is several named matrices, one below the other, because one product is faster than several.

    rows: the name of each matrix and its number of rows `(d_model,)`. Weights are exported under these names; the parts
    of b that belong to the matrices have b in the place of w (`w_u`, `b_u`).
    unit_rows: nGPT's parametrization: W is the stored matrix with each row divided by its length, so that gradients are
    tangent to the sphere.

    With `add_gains` each matrix reads gain * x instead of x, with a gain `(d_model,)` of its own, `gain_wq` for `wq`.

    Matrix and bias are stored in fp32. At each use W is cast to the dtype of x, or read from the optimizer's bf16 copy.
    """

    def __init__(self, rows: Mapping[str, int], d_model: int, bias: bool = False, unit_rows: bool = False) -> None:
        super().__init__()
        self.rows = dict(rows)
        self.unit_rows = unit_rows
        self.matrix = nn.Parameter(torch.empty(sum(self.rows.values()), d_model))
        self.bias = nn.Parameter(torch.empty(sum(self.bias_rows().values()))) if bias else None
        self.gains: nn.Parameter | None = None
        # The optimizer's bf16 copy of the matrix, set only during a training step (optim/row_adam.py).
        self.bf16_copy: Tensor | None = None

    def add_gains(self) -> None:
        self.gains = nn.Parameter(torch.ones(len(self.rows) * self.matrix.shape[1]))

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.gains is not None:
            nn.init.ones_(self.gains)

    def bias_rows(self) -> dict[str, int]:
        """For each matrix, the name and length of its part of b."""
        return {"b" + name.removeprefix("w"): n_rows for name, n_rows in self.rows.items()}

    def parts(self) -> dict[str, dict[str, int]]:
        """For each parameter of this module, the names and numbers of rows of the weights that are stacked in it."""
        gains = {f"gain_{name}": self.matrix.shape[1] for name in self.rows}
        parts = {"matrix": self.rows, "bias": self.bias_rows(), "gains": gains}
        return {name: rows for name, rows in parts.items() if getattr(self, name) is not None}

    def weight(self, dtype: torch.dtype) -> Tensor:
        """W `(rows, d_model)` in `dtype`: normalised, copied by the optimizer, or cast from the stored matrix. A gain
        is multiplied into the columns of its matrix, W (gain * x) = (W diag(gain)) x: activations stay one x."""
        if self.unit_rows:
            return normalize(self.matrix).to(dtype)
        if self.gains is not None:
            parts, gains = self.matrix.split(list(self.rows.values())), self.gains.chunk(len(self.rows))
            return torch.cat([part * gain for part, gain in zip(parts, gains, strict=True)]).to(dtype)
        if self.bf16_copy is not None and dtype == torch.bfloat16:
            return _CastByCopy.apply(self.matrix, self.bf16_copy)
        return self.matrix.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., d_model)` -> `(..., rows)` in x's dtype."""
        return F.linear(x, self.weight(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class OutputLinear(FusedLinear):
    """y = x W + b, for the matrices that write into the residual stream. W is stored as `(rows, d_model)` here too.

    So in every matrix nGPT normalises rows, and FSDP2, which shards by rows, cuts none.
    """

    def bias_rows(self) -> dict[str, int]:
        return {"b" + name.removeprefix("w"): self.matrix.shape[1] for name in self.rows}

    def forward(self, x: Tensor) -> Tensor:
        """x `(..., rows)` -> `(..., d_model)` in x's dtype; rows is their total number."""
        y = x @ self.weight(x.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _CastByCopy(torch.autograd.Function):
    """`matrix.to(copy.dtype)`, read from a copy that exists already; with the gradient of `.to`."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = matrix.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast_linears(model: nn.Module) -> list[FusedLinear]:
    """Layers with a cast of the stored matrix, which a bf16 copy spares."""
    linears = [module for module in model.modules() if isinstance(module, FusedLinear)]
    return [linear for linear in linears if not linear.unit_rows and linear.gains is None]
