"""Rotary position embedding."""

from typing import NamedTuple

import torch
from torch import Tensor

from ngpt_train.kernels import rotary


class Rope(NamedTuple):
    """cos and sin of the angles, each `(T, 1, D/2)` or `(B, T, 1, D/2)`, and which dimensions form a pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool  # pairs (2i, 2i + 1); else (i, i + D/2), as in Hugging Face's Llama

    def at(self, positions: Tensor) -> "Rope":
        """The angles of positions `(B, T)`, taken from this table of the positions 0, 1, 2, ..."""
        return Rope(self.cos[positions], self.sin[positions], self.interleaved)


class RopeScaling(NamedTuple):
    """Other angles for rows that are longer than those of training; factors of 1 leave them as they are.

    linear: positions are divided by it, so that the longest row has the positions of training (Chen et al. 2023,
    arXiv:2306.15595, equation 4). ntk: base' = base * ntk^(d / (d - 2)), by which the slowest pair turns ntk times as
    slowly and the fastest as in training (the NTK-aware scaling of Peng et al. 2023, arXiv:2309.00071, equation 16).
    """

    linear: float = 1.0
    ntk: float = 1.0


UNSCALED = RopeScaling()


def rope_table(
    length: int,
    d_head: int,
    base: float,
    interleaved: bool,
    device: torch.device,
    dtype: torch.dtype,
    scaling: RopeScaling = UNSCALED,
) -> Rope:
    """cos and sin, `(length, 1, d_head / 2)` in `dtype`, of the angles t * base^(-2i / d_head) at positions t.

    The angles are computed in fp64: in fp32 they are off by 1e-4 rad at position 8192.
    """
    pairs = torch.arange(0, d_head, 2, device=device, dtype=torch.float64)
    positions = torch.arange(length, device=device, dtype=torch.float64) / scaling.linear
    if d_head > 2:  # a single pair turns by the position itself, whatever the base
        base *= scaling.ntk ** (d_head / (d_head - 2))
    angles = torch.outer(positions, base ** (-pairs / d_head)).unsqueeze(1)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)


def rotate(x: Tensor, rope: Rope | None) -> Tensor:
    """Rotates each pair of x `(B, T, H, D)` by its position's angle; the length of x does not change.

    Without rope, x itself: the model has no positions, or has them in the embedding.
    """
    return x if rope is None else rotary.rotate(x, *rope)
