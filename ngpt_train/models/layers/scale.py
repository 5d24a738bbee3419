"""Learned scale vectors whose step size is set apart from their value (nGPT, section 2.5)."""

import torch
from torch import Tensor, nn


class ScaledParameter(nn.Module):
    """A vector s that is stored as s_scale and used as s * s_init / s_scale.

    Adam moves every entry by about the learning rate, whatever the entry's size. Storing s at
    `scale` and multiplying by `init / scale` in the forward pass makes the effective step
    lr * init / scale, so one learning rate serves matrices and scales alike.

    Stored in fp32 under every layout and precision, shape `(size,)`.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        self.init = init
        self.scale = scale
        self.stored = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.stored, self.scale)

    def forward(self) -> Tensor:
        """The effective vector, shape `(size,)`, in the dtype it is stored in."""
        return self.stored * (self.init / self.scale)
