"""Learned scale vectors whose step size is set apart from their value (nGPT, section 2.5)."""

import math

import torch
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.models.ngpt.keys import ScaleVectorConfig


class ScaledParameter(nn.Module):
    """A vector s that is stored as s_scale and used as s * s_init / s_scale.

    Adam moves every entry by about the learning rate, whatever the entry's size. Storing s at
    `scale` and multiplying by `init / scale` in the forward pass makes the effective step
    lr * init / scale, so one learning rate serves matrices and scales alike.

    Stored in fp32 under every layout and precision: `(size,)` for kind=vector, `(1,)` for scalar; a fixed
    one is no parameter (section A.8, Table 5).
    """

    def __init__(self, size: int, chosen: ScaleVectorConfig, model: ModelConfig) -> None:
        super().__init__()
        self.size = size
        self.init = in_numbers(chosen.init, model)
        self.scale = 1.0 if chosen.kind == "fixed" else in_numbers(chosen.scale, model)
        stored = torch.empty(1 if chosen.kind == "scalar" else size)
        if chosen.kind == "fixed":
            self.register_buffer("stored", stored, persistent=False)
        else:
            self.stored = nn.Parameter(stored)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.stored, self.scale)

    def forward(self) -> Tensor:
        """The effective vector, shape `(size,)`, in the dtype it is stored in."""
        return (self.stored * (self.init / self.scale)).expand(self.size)


def in_numbers(value: float | str, model: ModelConfig) -> float:
    """A start of the config, which may be a word of ngpt.keys.SCALE_WORDS."""
    words = {"1/L": 1 / model.n_layers, "1/sqrt(d)": 1 / math.sqrt(model.d_model), "sqrt(d)": math.sqrt(model.d_model)}
    return words[value] if isinstance(value, str) else float(value)
