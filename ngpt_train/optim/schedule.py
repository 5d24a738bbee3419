"""The learning rate as a pure function of the step."""

import math

from ngpt_train.config.sections.optim import ScheduleConfig


def lr_at(step: int, schedule: ScheduleConfig, peak: float, steps: int) -> float:
    """Learning rate of optimizer step `step`; a run of `steps` steps has the numbers 0 to steps - 1.

    Step t of a warmup of W steps has peak (t + 1) / W, so that no step has the rate 0. After the warmup the rate is

    - cosine, linear, wsd, log: from `peak` at step W down to `schedule.final_lr` at step `steps`, one after the last;
    - constant: `peak`;
    - inverse_sqrt: peak sqrt(W / (t + 1)), which is `peak` at the last step of the warmup (Vaswani et al. 2017, section
      5.3, with the peak in place of their factor); W = 0 counts as 1;
    - ramp: peak (t + 1) / steps, a warmup of the whole run (NormFormer's test of stability, Figure 5).
    """
    assert isinstance(schedule.warmup_steps, int)  # `auto` is resolved when the config is loaded
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    match schedule.kind:
        case "constant":
            return peak
        case "inverse_sqrt":
            return peak * math.sqrt(max(1, schedule.warmup_steps) / (step + 1))
        case "ramp":
            return peak * (step + 1) / steps
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    return schedule.final_lr + (peak - schedule.final_lr) * _remaining(progress, schedule, steps)


def _remaining(progress: float, schedule: ScheduleConfig, steps: int) -> float:
    """(lr - final_lr) / (peak - final_lr), from 1 to 0. progress: the share, 0 to 1, of the steps after the warmup."""
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
        case "log":  # "Training nGPT" (arXiv 2608.01284), second-hand
            return 1 - math.log1p(progress / schedule.rho) / math.log1p(1 / schedule.rho)
        case kind:
            raise AssertionError(f"schedule.kind={kind} passed validation")
