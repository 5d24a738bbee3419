"""Telemetry: what happens inside of single training steps. docs/telemetry.md defines every number.

Here: numbers of a step on this rank, for one part of the telemetry, and how ranks combine them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Record = dict[str, float]


class Numbers(NamedTuple):
    """1-dim fp64 tensors on the device, of the same lengths on every rank."""

    summed: Tensor  # ranks combine them to their sum
    largest: Tensor  # ranks combine them to the largest


class Part(Protocol):
    """A part of the telemetry. It has seen the whole step when `after_update` is called."""

    def after_update(self) -> Numbers: ...
    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        """The fields of the record. summed, largest: from `after_update`, combined over all ranks."""


def norms(parts: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The L1, L2 or (order=inf) largest norm of each part, `(len(parts),)` fp64; 0 for a part without elements. On CPUs
    the sums are in fp64, as in distributed/layouts.py."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    filled = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(filled, order, dtype=dtype) if filled else [])
    nothing = torch.zeros((), dtype=dtype, device=device)
    return stacked([next(found) if part.numel() else nothing for part in parts], device)


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim tensors as one tensor, `(len(values),)` fp64; `values` may be empty."""
    return torch.stack(list(values)).double() if values else torch.zeros(0, dtype=torch.float64, device=device)


def ratio(numerator: float, denominator: float) -> float:
    """NaN where the denominator is 0."""
    return numerator / denominator if denominator else math.nan
