"""Random values on a device, the same each time."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """Draws in fp32 on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    def vector(self, size: int, around: float) -> Tensor:
        """A learned scale `(size,)`."""
        return (around * (1 + 0.3 * self.normal(size))).requires_grad_()

    def activations(
        self, shape: tuple[int, ...], dtype: str, stride: tuple[int, ...] | None, size: float = 1.0
    ) -> Tensor:
        """Values of about `size` that get a gradient. dtype: such as "bfloat16"; stride: None is contiguous."""
        values = (size * self.normal(*shape)).to(getattr(torch, dtype))
        if stride is not None:
            values = torch.empty_strided(shape, stride, dtype=values.dtype, device=self.device).copy_(values)
        return values.requires_grad_()

    def angles(self, T: int, D: int) -> tuple[Tensor, Tensor]:
        """cos and sin `(T, 1, D/2)` of rotary positions."""
        pairs = torch.arange(0, D, 2, device=self.device, dtype=torch.float64)
        places = torch.arange(T, device=self.device, dtype=torch.float64)
        angles = torch.outer(places, 10_000 ** (-pairs / D))[:, None]
        return angles.cos().float(), angles.sin().float()
