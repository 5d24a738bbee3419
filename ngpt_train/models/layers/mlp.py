"""The MLP, gated (SwiGLU) or plain. One for all architectures."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.dispatch import falls_back
from ngpt_train.kernels.swiglu import swiglu
from ngpt_train.models.layers.attention import linear
from ngpt_train.models.layers.matrix import InUse, Stacked, as_stored


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,  # the exact one, not tanh's approximation
    "relu2": relu2,
}


class MLP(nn.Module):
    """hidden W_down, with hidden = u * act(v), u = W_u x, v = W_v x; without a gate hidden = act(u).

    W_u, W_v and W_down are `(d_mlp, d_model)`; W_down is applied from the right. W_u and W_v lie one below the other
    in `w_uv`, because one product of both is faster.
    """

    def __init__(
        self,
        config: ModelConfig,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        in_use: InUse = as_stored,
    ) -> None:
        super().__init__()
        assert not (gated and bias)
        self.d_mlp = config.d_mlp or 4 * config.d_model
        self.activation = ACTIVATIONS[activation]
        self.in_use = in_use
        self.w_uv = nn.Parameter(torch.empty(2 * self.d_mlp, config.d_model)) if gated else None
        self.w_u = None if gated else nn.Parameter(torch.empty(self.d_mlp, config.d_model))
        self.w_down = nn.Parameter(torch.empty(self.d_mlp, config.d_model))
        self.b_u = nn.Parameter(torch.empty(self.d_mlp)) if bias else None
        self.b_down = nn.Parameter(torch.empty(config.d_model)) if bias else None
        self.stacked: Stacked = {"w_uv": {"w_u": self.d_mlp, "w_v": self.d_mlp}}

    def reset_parameters(self) -> None:
        for bias in (self.b_u, self.b_down):
            if bias is not None:
                nn.init.zeros_(bias)

    def gated(self, x: Tensor, w_uv: Tensor) -> Tensor:
        """The hidden state `(B, T, d_mlp)` of x `(B, T, d_model)`."""
        uv = F.linear(x, w_uv)
        if self.activation is F.silu:
            return swiglu(uv)
        falls_back("swiglu", uv, f"model.activation={self.activation.__name__}")
        u, v = uv.chunk(2, dim=-1)
        return u * self.activation(v)

    def plain(self, u: Tensor) -> Tensor:
        """The hidden state of an MLP without a gate, both `(B, T, d_mlp)`."""
        return self.activation(u)

    def forward(self, x: Tensor) -> Tensor:
        """x `(B, T, d_model)` -> `(B, T, d_model)`."""
        if self.w_uv is not None:
            hidden = self.gated(x, self.in_use(self.w_uv, x.dtype))
        else:
            assert self.w_u is not None
            hidden = self.plain(linear(x, self.in_use(self.w_u, x.dtype), self.b_u))
        y = hidden.to(x.dtype) @ self.in_use(self.w_down, x.dtype)
        return y if self.b_down is None else y + self.b_down.to(y.dtype)
