"""The MLP with a gate, of most architectures, and the one without, of NormFormer and of GPT's model.mlp=plain."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.dispatch import say_without_kernel
from ngpt_train.kernels.swiglu import swiglu
from ngpt_train.models.layers.linear import FusedLinear, OutputLinear
from ngpt_train.models.layers.norms import Map, identity


def geglu(uv: Tensor) -> Tensor:
    """u * GELU(v): uv `(..., 2 m)` = [u, v] -> `(..., m)`; the exact GELU, not the tanh approximation."""
    say_without_kernel("swiglu", "model.activation=gelu", uv)
    u, v = uv.chunk(2, dim=-1)
    return u * F.gelu(v)


GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu": geglu}


class MLP(nn.Module):
    """SwiGLU(u, v) W_down with u = W_u x, v = W_v x and SwiGLU(u, v) = u * SiLU(v): eq. 17 to 19 of nGPT's paper.

    W_u, W_v and W_down (the paper's W_oMLP) are `(d_mlp, d_model)`; W_u and W_v are one product, W_down is applied from
    the right. activation=gelu: u * GELU(v). Biases are an option.
    """

    def __init__(
        self, config: ModelConfig, activation: str = "silu", unit_rows: bool = False, bias: bool = False
    ) -> None:
        super().__init__()
        self.d_mlp = config.d_mlp or 4 * config.d_model
        self.activation = activation
        self.w_uv = FusedLinear({"w_u": self.d_mlp, "w_v": self.d_mlp}, config.d_model, bias, unit_rows)
        self.w_down = OutputLinear({"w_down": self.d_mlp}, config.d_model, bias, unit_rows)

    def hidden(self, x: Tensor) -> Tensor:
        """SwiGLU(u, v) `(B, T, d_mlp)` of x `(B, T, d_model)`."""
        return GATES[self.activation](self.w_uv(x))  # eq. 17 and 18

    def forward(self, x: Tensor, norm_ffn: Map = identity) -> Tensor:
        """x `(B, T, d_model)` -> the same shape. norm_ffn: NormFormer's norm of the hidden state."""
        return self.w_down(norm_ffn(self.hidden(x)).to(x.dtype))  # eq. 19


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # the exact one, not the tanh approximation
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class PlainMLP(MLP):
    """sigma(W_u x + b_u) W_down + b_down, an MLP without a gate: sigma is `activation`.

    W_u and W_down are `(d_mlp, d_model)`, W_down is applied from the right. The biases are an option.
    """

    def __init__(self, config: ModelConfig, activation: str, bias: bool = False) -> None:
        nn.Module.__init__(self)
        self.d_mlp = config.d_mlp or 4 * config.d_model
        self.activation = activation
        self.w_u = FusedLinear({"w_u": self.d_mlp}, config.d_model, bias)
        self.w_down = OutputLinear({"w_down": self.d_mlp}, config.d_model, bias)

    def hidden(self, x: Tensor) -> Tensor:
        """sigma(W_u x + b_u) `(B, T, d_mlp)` of x `(B, T, d_model)`."""
        return ACTIVATIONS[self.activation](self.w_u(x))


MLPS: dict[str, Callable[..., MLP]] = {"gated": MLP, "plain": PlainMLP}
