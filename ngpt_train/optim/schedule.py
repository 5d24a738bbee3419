"""The learning rate as a pure function of the step."""

import math

from ngpt_train.config.schema import ScheduleConfig


def lr_at(step: int, schedule: ScheduleConfig, peak: float, steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `steps`.

    peak * (t + 1) / W at step t of a warmup of W steps, so that no step is wasted at 0; then from
    peak towards final_lr, which the step after the last would have.
    """
    assert isinstance(schedule.warmup_steps, int)  # `auto` is resolved when the config is loaded
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    return schedule.final_lr + (peak - schedule.final_lr) * _remaining(progress, schedule, steps)


def _remaining(progress: float, schedule: ScheduleConfig, steps: int) -> float:
    """What is left of the peak, 1 to 0, after the share `progress` of the steps behind the warmup."""
    match schedule.kind:
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return 1 - progress
        case "wsd":
            assert isinstance(schedule.warmup_steps, int)
            # decay_fraction is a share of all steps, so that its meaning does not depend on the warmup.
            decay = min(1.0, schedule.decay_fraction * steps / max(1, steps - schedule.warmup_steps))
            return min(1.0, (1 - progress) / decay)
        case kind:
            raise AssertionError(f"schedule.kind={kind} passed validation")
