"""The loss scale of fp16 keeps gradients within fp16's range (Micikevicius et al. 2018, section 3.2)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# fp16 ends at 65504 and loses digits below 6e-5. The scales are powers of two, so that scaling rounds nothing.
START = 2.0**16
# Without a scale, gradients overflow only where the forward pass does too, and no scale helps against that.
SMALLEST = 1.0
LARGEST = 2.0**24
GROWTH_INTERVAL = 2000  # good steps in a row before the scale doubles


class LossScale:
    """A dynamic loss scale, on the device, so that no step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), START, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)  # in a row, since the scale last changed

    def update_(self, skipped: Tensor) -> None:
        """Halves the scale after a skipped step, and doubles it after GROWTH_INTERVAL good steps in a row. skipped:
        0-dim bool, the same on every rank."""
        good_steps = (self.good_steps + 1) * ~skipped
        grows = good_steps >= GROWTH_INTERVAL
        self.value = (self.value * (1 + grows.float() - 0.5 * skipped.float())).clamp(SMALLEST, LARGEST)
        self.good_steps = good_steps * ~grows

    def state_dict(self) -> dict[str, Any]:
        """Scale and number of good steps, as exact numbers for JSON."""
        return {"value": float(self.value), "good_steps": int(self.good_steps)}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self.value.fill_(stored["value"])
        self.good_steps.fill_(stored["good_steps"])
