"""Sums over the steps between two train records. They are on the device, so that no step waits for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ngpt_train.training.step import StepResult


class Interval:
    """Sums since the last train record: the loss, targets, steps, skipped steps and clipped steps.

    clip_norm: gradients with a larger norm are clipped; None: no gradient is clipped. A checkpoint holds the sums, so
    that the first record after a resume is the same as without the interruption.
    """

    def __init__(self, device: torch.device, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # nats
        self._n_targets = torch.zeros((), dtype=torch.int64, device=device)
        self._n_skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._n_clipped = torch.zeros((), dtype=torch.int64, device=device)
        self._n_steps = 0

    def add(self, result: StepResult) -> None:
        """Adds a step. A skipped step, whose loss may be NaN, adds to the skipped steps alone."""
        self._loss_sum += result.loss_sum.masked_fill(result.skipped, 0.0)
        self._n_targets += result.n_tokens.masked_fill(result.skipped, 0)
        self._n_skipped += result.skipped
        self._n_steps += 1
        if self._clip_norm is not None:
            self._n_clipped += (result.grad_norm > self._clip_norm) & ~result.skipped

    @property
    def loss_mean(self) -> float:
        """Mean cross-entropy in nats over all targets, without skipped steps; NaN if there are no targets.

        Every target has the same weight, as in the loss of a step.
        """
        return float(self._loss_sum / self._n_targets) if self._n_targets else math.nan

    @property
    def n_skipped(self) -> int:
        return int(self._n_skipped)

    @property
    def clipped(self) -> float | None:
        """Clipped steps / steps; None without clipping. Skipped steps do not count as clipped."""
        return None if self._clip_norm is None or not self._n_steps else int(self._n_clipped) / self._n_steps

    def reset(self) -> None:
        for value in (self._loss_sum, self._n_targets, self._n_skipped, self._n_clipped):
            value.zero_()
        self._n_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The sums as exact numbers for JSON."""
        return {
            "loss_sum": float(self._loss_sum),
            "n_targets": int(self._n_targets),
            "n_skipped": int(self._n_skipped),
            "n_clipped": int(self._n_clipped),
            "n_steps": self._n_steps,
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self._loss_sum.fill_(stored["loss_sum"])
        self._n_targets.fill_(stored["n_targets"])
        self._n_skipped.fill_(stored["n_skipped"])
        # Earlier versions did not count these: then the share covers the steps since the resume.
        self._n_clipped.fill_(stored.get("n_clipped", 0))
        self._n_steps = stored.get("n_steps", 0)
