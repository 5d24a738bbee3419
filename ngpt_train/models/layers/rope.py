"""The angles of rotary position embedding."""

from typing import NamedTuple

import torch

from ngpt_train.kernels.rotary import Rope

__all__ = ["UNSCALED", "Rope", "RopeScaling", "rope_table"]


class RopeScaling(NamedTuple):
    """Other angles for rows that are longer than in training. Factors of 1 change nothing.

    linear: positions are divided by it, so that the longest row has the positions of training (Chen et al. 2023,
    arXiv:2306.15595, equation 4). ntk: base' = base * ntk^(d / (d - 2)). The slowest pair then turns ntk times as
    slowly, the fastest as in training (the NTK-aware scaling of Peng et al. 2023, arXiv:2309.00071, equation 16).
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
