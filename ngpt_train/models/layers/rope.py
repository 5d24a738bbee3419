"""Rotary position embedding on half-split pairs (i, i + D/2), as Hugging Face's Llama has it."""

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cos and sin of the angles, each (T, 1, D/2)


def rope_table(length: int, d_head: int, base: float, device: torch.device, dtype: torch.dtype) -> Rope:
    """cos and sin of the angles t * base^(-2i / d_head), each `(length, 1, d_head / 2)`.

    The angles are computed in fp64: in fp32 they are off by 1e-4 rad at position 8192.
    """
    pairs = torch.arange(0, d_head, 2, device=device, dtype=torch.float64)
    positions = torch.arange(length, device=device, dtype=torch.float64)
    angles = torch.outer(positions, base ** (-pairs / d_head)).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates each pair of x `(B, T, H, D)` by its position's angle; the length of x does not change."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
