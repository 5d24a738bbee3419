"""Stopping from outside, by a signal or the time limit: all ranks stop after the same step."""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from ngpt_train.core.errors import DataError
from ngpt_train.distributed.world import World
from ngpt_train.training.loop import Hook, StoppedWaitingError, TrainingRun

# Sent by a launcher, a queue, Ctrl-C and a terminal that is closed.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A Ctrl-C reaches the workers of torchrun twice: from the terminal, and from torchrun, which forwards the signal. A
# second SIGINT within this many seconds is that echo and does not count.
ECHO_SECONDS = 1.0
# Seconds that a rank waits for its next row after it was told to stop, where there are several ranks.
LAST_SECONDS = 15.0
# Seconds between two questions of the ranks whether one was told to stop. torchrun kills its workers 30 seconds after
# SIGTERM, and by then the checkpoint must be written.
ASK_SECONDS = 1.0
MOST_STEPS = 16  # between two questions, even if steps are quick, because the next ones may be slow


class StopRequest:
    """Inside a `with`, the signals of STOPPING do not end the process but set `reason`, which the loop reads. An
    ignored signal stays ignored, such as SIGHUP under `nohup`.

    A second SIGINT ends the process at once, with exit code 130 as shells expect. No checkpoint is damaged, because
    checkpoints are written atomically. max_hours counts from construction.
    """

    def __init__(self, max_hours: float | None) -> None:
        self.deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self.signal_name: str | None = None
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in STOPPING:
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.signal_name and now - self._first > ECHO_SECONDS:
            os._exit(130)
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            self._first = now

    @property
    def reason(self) -> str | None:
        """Why this process wants to stop, or None."""
        if self.signal_name:
            return f"stopped by {self.signal_name}"
        if self.deadline is not None and time.monotonic() > self.deadline:
            return "stopped by run.max_time"
        return None


class Patience:
    """Ends a trainer's wait for a row of streamed text: after a time, or when the process is told to stop; of several
    ranks LAST_SECONDS later, because the others wait in the next step, and nothing can be saved."""

    def __init__(self, stop: StopRequest, world: World, fetch_minutes: float) -> None:
        """fetch_minutes: data.fetch_minutes, a worker's limit for a shard; decoding may take as long again."""
        self._stop, self._alone, self._longest = stop, world.size == 1, 2 * 60 * fetch_minutes
        self._rank = world.rank

    def __call__(self, seconds: float) -> None:
        """seconds: of waiting so far. Raises StoppedWaitingError or DataError."""
        if self._stop.reason and (self._alone or seconds > LAST_SECONDS):
            problem = f"{self._stop.reason}, while rank {self._rank} waited for rows"
            raise StoppedWaitingError(f"{problem}; the same command goes on from the last checkpoint")
        if seconds > self._longest:
            raise DataError(
                f"rank {self._rank} has waited {seconds / 60:.1f} minutes for a row, twice data.fetch_minutes: a data "
                "worker is stopped or stuck. The same command goes on from the last checkpoint; with data.workers=0 "
                "the trainer makes the rows itself"
            )


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
        """step: number of completed steps; the first question follows the next one. clock: in seconds. news: True if
        this rank has news for all ranks, such as a failed save. Then all ranks call `hear` after the same step."""
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
