"""Sums over the steps between two train records. They are on the device, so that no step waits for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ngpt_train.training.step import StepResult


class Interval:
    """Summed loss, number of targets and number of skipped steps since the last train record.

    A checkpoint holds these, so that the first record after a resume is the same as without the interruption.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # nats
        self._n_targets = torch.zeros((), dtype=torch.int64, device=device)
        self._n_skipped = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, result: StepResult) -> None:
        """Adds a step. Of a skipped step, whose loss may be NaN, only the fact that it was skipped counts."""
        self._loss_sum += result.loss_sum.masked_fill(result.skipped, 0.0)
        self._n_targets += result.n_tokens.masked_fill(result.skipped, 0)
        self._n_skipped += result.skipped

    @property
    def loss_mean(self) -> float:
        """Cross-entropy in nats, mean over all targets of the steps that were not skipped; NaN if there are none.

        Every target has the same weight, as in the loss of a step, so that a step with few targets has little weight.
        """
        return float(self._loss_sum / self._n_targets) if self._n_targets else math.nan

    @property
    def n_skipped(self) -> int:
        return int(self._n_skipped)

    def reset(self) -> None:
        for value in (self._loss_sum, self._n_targets, self._n_skipped):
            value.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The sums as numbers that JSON stores without loss."""
        return {
            "loss_sum": float(self._loss_sum),
            "n_targets": int(self._n_targets),
            "n_skipped": int(self._n_skipped),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self._loss_sum.fill_(stored["loss_sum"])
        self._n_targets.fill_(stored["n_targets"])
        self._n_skipped.fill_(stored["n_skipped"])
