"""Reasons to end a run or to send it back: gradients that are not finite, spikes of the loss, too little memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ngpt_train.config.sections.records import GuardsConfig
from ngpt_train.core.constants import DIVERGED
from ngpt_train.optim.loss_scale import SMALLEST

if TYPE_CHECKING:
    from ngpt_train.training.step import StepResult

# A run survives a single bad batch. After so many skipped steps in a row it does not recover.
MAX_SKIPPED_IN_A_ROW = 10
MAD_TO_DEVIATION = 1.4826  # standard deviation / median absolute deviation, for a normal distribution
LEAST_DEVIATION = 0.01  # as a share of the median: where losses hardly vary, a small rise is no spike
LEAST_SHARE = 4  # losses are judged once 1 / LEAST_SHARE of the window is there


class NumericalError(RuntimeError):
    """Training has become numerically meaningless; the weights are still sound."""

    exit_code = DIVERGED


class DeviceMemoryError(RuntimeError):
    """The device has too little memory for the micro batch."""

    exit_code = 1


class Guards:
    """Counts skipped steps in a row and, with guards.rollback, finds the bad step: the first step with a spike.
    Everything is on the device, so that no step waits for it, and the same on every rank.

    A spike is a loss above the median of the earlier losses by `spike_height` deviations. The deviation is estimated
    from the differences of successive losses, which stay small while the loss falls. A checkpoint holds the losses.
    """

    def __init__(self, config: GuardsConfig, device: torch.device) -> None:
        self._config = config
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._losses = torch.full((config.spike_window,), torch.nan, dtype=torch.float64, device=device)  # newest last
        self._bad_step = torch.zeros((), dtype=torch.int64, device=device)  # the first one since `forget`; 0: none
        self._facts = torch.zeros(3, dtype=torch.float64, device=device)  # of the bad step: loss, median, bound

    def add(self, result: StepResult, step: int) -> None:
        """Adds a step. step: its number, from 1."""
        without_remedy = result.skipped  # a smaller loss scale would not have helped either
        if result.loss_scale is not None:
            without_remedy = without_remedy & (result.loss_scale <= SMALLEST)
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * without_remedy
        if not self._config.rollback:
            return
        loss, losses = result.loss.double(), self._losses
        median = losses.nanmedian()
        changes = losses.diff()  # their variance is twice the variance of the losses
        deviation = MAD_TO_DEVIATION * (changes - changes.nanmedian()).abs().nanmedian() / math.sqrt(2)
        bound = median + self._config.spike_height * deviation.clamp(min=LEAST_DEVIATION * median)
        enough = losses.isfinite().sum() * LEAST_SHARE >= len(losses)
        spikes = enough & (loss > bound) & ~result.skipped
        first = (spikes | (self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW)) & (self._bad_step == 0)
        self._bad_step = torch.where(first, step, self._bad_step)
        self._facts = torch.where(first, torch.stack([loss, median, bound]), self._facts)
        counts = ~result.skipped & (self._bad_step == 0)
        self._losses = torch.where(counts, torch.cat([losses[1:], loss.reshape(1)]), losses)

    def bad_step(self) -> int:
        """The number of the bad step since `forget`, 0 if there is none. Waits for the device."""
        return int(self._bad_step) if self._config.rollback else 0

    def facts(self) -> dict[str, float | None]:
        """The bad step's loss, and the median of the earlier losses; None where a number is not finite."""
        loss, median, _ = self._facts.tolist()
        return {name: x if abs(x) < torch.inf else None for name, x in (("loss", loss), ("median", median))}

    def why(self) -> str:
        """The reason to go back, in words."""
        step, (loss, median, bound) = int(self._bad_step), self._facts.tolist()
        if loss > bound:
            return f"the loss of step {step} is {loss:.4g}, after a median of {median:.4g}"
        return f"{MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {step}, had a gradient that is not finite"

    def forget(self) -> None:
        """Forgets the bad step, because there is no checkpoint to go back to, and looks for another."""
        self._bad_step.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Exact numbers for JSON. A state with a bad step is not saved."""
        losses = [loss for loss in self._losses.tolist() if loss == loss]
        return {"skipped_in_a_row": int(self.skipped_in_a_row), "losses": losses}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """stored: from `state_dict`; earlier versions saved nothing."""
        self.skipped_in_a_row.fill_(stored.get("skipped_in_a_row", 0))
        self._bad_step.zero_()
        self._losses.fill_(torch.nan)
        if losses := stored.get("losses", [])[-len(self._losses) :]:
            self._losses[-len(losses) :] = torch.tensor(losses, dtype=torch.float64)


@contextmanager
def explain_out_of_memory(micro_rows: int) -> Iterator[None]:
    """Turns torch's out-of-memory errors, of GPUs and CPUs, into a DeviceMemoryError that says which keys to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        text = str(error)
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in text:
            raise
        smaller = f"train.micro_rows={max(1, micro_rows // 2)}" if micro_rows > 1 else "train.micro_rows is 1 already"
        raise DeviceMemoryError(
            f"train.micro_rows={micro_rows}: out of memory ({text.splitlines()[0]}). Try {smaller}; the batch and "
            "the result stay the same. Further: train.activation_checkpointing=full, parallel=fsdp on more ranks, "
            "or a shorter model.context."
        ) from error
