"""All ranks stop after the same step once one of them is told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ngpt_train.training.hooks.hook import Hook, TrainingRun

if TYPE_CHECKING:
    from ngpt_train.distributed.world import World
    from ngpt_train.training.signals import StopRequest

# Seconds between two questions of the ranks whether one was told to stop. torchrun kills its workers 30 seconds after
# SIGTERM, and by then the checkpoint must be written.
ASK_SECONDS = 1.0
MOST_STEPS = 16  # between two questions, even if steps are quick, because the next ones may be slow


class StopTogether(Hook):
    """Sets `run.reason` on all ranks after the same step.

    The ranks ask each other in an all-reduce over their CPUs, which is too slow for every step of many ranks. So they
    ask about once in ASK_SECONDS. The same all-reduce finds the slowest step of any rank since the last question. The
    next question follows after as many such steps as fit into ASK_SECONDS, at least 1 and at most MOST_STEPS. A single
    rank asks after each step, without a cost.
    """

    def __init__(
        self,
        stop: StopRequest,
        world: World,
        step: int,
        clock: Callable[[], float] = time.monotonic,
        news: Callable[[], bool] = lambda: False,
        hear: Callable[[TrainingRun], None] = lambda run: None,
    ) -> None:
        """step: number of completed steps; the first question follows the next one. clock: in seconds.

        news: True if this rank has news for all ranks, such as a failed save. Then all ranks call `hear` after the same
        step.
        """
        self._stop, self._world, self._clock, self._news, self._hear = stop, world, clock, news, hear
        self.heard = False
        self._steps_between, self._next_question = 1, step + 1
        self._last_call, self._slowest_step = clock(), 0.0

    def after_step(self, run: TrainingRun) -> None:
        run.reason = self.reason(run.step)
        if self.heard:
            self._hear(run)

    def reason(self, step: int) -> str | None:
        """Why the run ends after `step`, the same on every rank; None if it goes on. Called after each step."""
        now = self._clock()
        self._slowest_step = max(self._slowest_step, now - self._last_call)
        self._last_call, self.heard = now, False
        if step < self._next_question and self._world.size > 1:
            return None
        own = self._stop.reason
        stopping, slowest_step, heard = self._world.largest([own is not None, self._slowest_step, self._news()])
        self.heard = bool(heard)
        if stopping:
            return next(reason for reason in self._world.gather(own) if reason)
        # At most twice as many steps as before: on a GPU the host may run ahead, and then steps seem too short.
        most = min(2 * self._steps_between, MOST_STEPS)
        self._steps_between = max(1, min(most, int(ASK_SECONDS / max(slowest_step, 1e-9))))
        self._next_question, self._slowest_step = step + self._steps_between, 0.0
        return None
