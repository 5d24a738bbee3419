"""A product whose outputs are scaled, by scaling the rows of the matrix instead: s (W x) = (s W) x.

Where a batch has more tokens than d_model, W has fewer elements than W x, so it is cheaper to scale W:

    y = (s W) x,    dx = (s W)^T dy,    dW = s (dy x^T),    ds = rowsum((dy x^T) W)

In half precision s W would be rounded once more than W x; there swiglu scales u and v itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ngpt_train.kernels.swiglu import swiglu


def scaled_swiglu(x: Tensor, w_uv: Tensor, s_u: Tensor, s_v: Tensor) -> Tensor:
    """(s_u u) * SiLU(s_v v), where u and v are the halves of W_uv x.

    x `(..., d_model)`, w_uv `(2 d_mlp, d_model)`, s_u and s_v `(d_mlp,)` -> `(..., d_mlp)` in x's dtype.
    """
    if x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu":
        return swiglu(scaled_linear(x, w_uv, torch.cat([s_u, s_v])))
    return swiglu(F.linear(x, w_uv), s_u, s_v)


def scaled_linear(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """scale * (matrix x): x `(..., d_in)`, matrix `(d_out, d_in)`, scale `(d_out,)` -> `(..., d_out)`."""
    return _ScaledLinear.apply(x, matrix, scale)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        # Backward computes s W again: keeping it would take as much memory as all weights.
        ctx.save_for_backward(x, matrix, scale)
        return F.linear(x, scale[:, None] * matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, matrix, scale = ctx.saved_tensors
        dx = dy @ (scale[:, None] * matrix)
        product = dy.flatten(0, -2).T @ x.flatten(0, -2)
        dscale = (product * matrix).sum(1)
        return dx, product.mul_(scale[:, None]), dscale
