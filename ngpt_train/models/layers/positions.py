"""Positions that are added to the embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_positions(h: Tensor, positions: Tensor, learned: Tensor | None) -> Tensor:
    """h `(B, T, d_model)` plus the vectors of positions `(T,)` or `(B, T)` (Vaswani et al. 2017, section 3.5). learned:
    a table `(context, d_model)`; None: sinusoids. Raises ValueError for a longer row."""
    T, d_model = h.shape[1:]
    if learned is None:
        return h + sinusoids(T, d_model, h.device).to(h.dtype)[positions]
    if len(learned) < T:
        raise ValueError(f"a row of {T} tokens: model.positions=learned knows {len(learned)} positions")
    return h + F.embedding(positions, learned)


def sinusoids(length: int, d_model: int, device: torch.device) -> Tensor:
    """PE `(length, d_model)` in fp64: PE(t, 2i) = sin(t / 10000^(2i/d)), PE(t, 2i + 1) = cos(t / 10000^(2i/d)).

    Vaswani et al. 2017, section 3.5.
    """
    t = torch.arange(length, device=device, dtype=torch.float64)
    evens = torch.arange(0, d_model, 2, device=device, dtype=torch.float64)
    angles = torch.outer(t, 10000.0 ** (-evens / d_model))  # (T, d/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :d_model]
