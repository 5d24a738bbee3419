"""The numbers that a part of the telemetry takes from a step, on this rank, and how ranks combine them."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Record = dict[str, float]


class Numbers(NamedTuple):
    """1-dim fp64 tensors on the device, of the same lengths on every rank."""

    summed: Tensor  # whose sums over ranks the record is made of
    largest: Tensor  # whose largest values over ranks it is made of


class Part(Protocol):
    """A part of the telemetry, which has seen a step by the time of `after_update`."""

    def after_update(self) -> Numbers: ...
    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        """The numbers of the record, of those that `after_update` returned, over all ranks."""


def norms(parts: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The L1, L2 or (order=inf) largest norm of each part, `(len(parts),)` fp64; 0 for a part without elements.

    On CPUs the sums are in fp64, as in distributed/gradients.py.
    """
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    filled = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(filled, order, dtype=dtype) if filled else [])
    nothing = torch.zeros((), dtype=dtype, device=device)
    return stacked([next(found) if part.numel() else nothing for part in parts], device)


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim tensors as one, `(len(values),)` fp64; there may be none."""
    return torch.stack(list(values)).double() if values else torch.zeros(0, dtype=torch.float64, device=device)


def ratio(numerator: float, denominator: float) -> float:
    """NaN where the denominator is 0."""
    return numerator / denominator if denominator else math.nan
