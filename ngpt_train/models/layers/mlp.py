"""The gated MLP (SwiGLU)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.schema import ModelConfig


class MLP(nn.Module):
    """(u * SiLU(v)) W_down with u = W_u x and v = W_v x; W_u, W_v, W_down are `(d_mlp, d_model)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d_mlp = config.d_mlp or 4 * config.d_model
        self.w_u = nn.Parameter(torch.empty(d_mlp, config.d_model))
        self.w_v = nn.Parameter(torch.empty(d_mlp, config.d_model))
        self.w_down = nn.Parameter(torch.empty(d_mlp, config.d_model))

    def hidden(self, u: Tensor, v: Tensor) -> Tensor:
        """The hidden state from its two projections, all `(B, T, d_mlp)`."""
        return u * F.silu(v)

    def forward(self, x: Tensor) -> Tensor:
        """x `(B, T, d_model)` -> `(B, T, d_model)`."""
        u = F.linear(x, self.w_u.to(x.dtype))
        v = F.linear(x, self.w_v.to(x.dtype))
        return self.hidden(u, v).to(x.dtype) @ self.w_down.to(x.dtype)
