"""What the steps between two train records add up to, on the device, so that no step waits for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ngpt_train.training.step import StepResult


class Interval:
    """Since the last train record: summed loss, targets that counted and skipped steps. A checkpoint keeps it, so that
    the first record after a resume is that of a run that went on."""

    def __init__(self, device: torch.device) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # nats
        self._n_targets = torch.zeros((), dtype=torch.int64, device=device)
        self._n_skipped = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, result: StepResult) -> None:
        """Of a skipped step, whose loss may be no number, it counts only that it was skipped."""
        self._loss_sum += result.loss_sum.masked_fill(result.skipped, 0.0)
        self._n_targets += result.n_tokens.masked_fill(result.skipped, 0)
        self._n_skipped += result.skipped

    @property
    def loss_mean(self) -> float:
        """Cross-entropy in nats, mean over all targets of the steps that were not skipped: each target counts alike,
        as in the loss of a step, so a step with few targets counts little. NaN where no step was taken."""
        return float(self._loss_sum / self._n_targets) if self._n_targets else math.nan

    @property
    def n_skipped(self) -> int:
        return int(self._n_skipped)

    def begin_anew(self) -> None:
        for value in (self._loss_sum, self._n_targets, self._n_skipped):
            value.zero_()

    def state_dict(self) -> dict[str, Any]:
        """JSON, which keeps every digit."""
        return {
            "loss_sum": float(self._loss_sum),
            "n_targets": int(self._n_targets),
            "n_skipped": int(self._n_skipped),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self._loss_sum.fill_(stored["loss_sum"])
        self._n_targets.fill_(stored["n_targets"])
        self._n_skipped.fill_(stored["n_skipped"])
