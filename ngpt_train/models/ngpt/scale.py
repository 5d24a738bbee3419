"""Learned scale vectors whose effective learning rate is set independently of their value (nGPT, section 2.5)."""

import math

import torch
from torch import Tensor, nn

from ngpt_train.models.ngpt.keys import NGPTConfig, ScaleVectorConfig


class ScaledParameter(nn.Module):
    """A vector s whose stored value starts at s_scale and whose effective value is stored * s_init / s_scale.

    Adam moves every stored entry by about the learning rate, whatever the entry's size. So the effective value moves by
    about lr * s_init / s_scale per step, and one learning rate suits matrices and scales alike.

    Stored in fp32 in every layout and precision: `(size,)` for kind=vector, `(1,)` for kind=scalar. With kind=fixed it
    is a buffer, not a parameter (section A.8, Table 5).
    """

    def __init__(self, size: int, chosen: ScaleVectorConfig, model: NGPTConfig) -> None:
        super().__init__()
        self.size = size
        self.init = value_of(chosen.init, model)
        self.scale = 1.0 if chosen.kind == "fixed" else value_of(chosen.scale, model)
        stored = torch.empty(1 if chosen.kind == "scalar" else size)
        if chosen.kind == "fixed":
            self.register_buffer("stored", stored, persistent=False)
        else:
            self.stored = nn.Parameter(stored)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.stored, self.scale)

    def forward(self) -> Tensor:
        """The effective vector `(size,)`, in the dtype of the stored one."""
        return (self.stored * (self.init / self.scale)).expand(self.size)


def value_of(value: float | str, model: NGPTConfig) -> float:
    """The value of `init` or `scale` in the config: a number, or one of ngpt.keys.SCALE_WORDS, computed for `model`."""
    words = {
        "1/L": 1 / model.n_layers,
        "0.05*L_ref/L": 0.05 / model.relative_depth,
        "1/sqrt(d)": 1 / math.sqrt(model.d_model),
        "sqrt(d)": math.sqrt(model.d_model),
        "sqrt(d/d_ref)": math.sqrt(model.relative_width),
    }
    return words[value] if isinstance(value, str) else float(value)
