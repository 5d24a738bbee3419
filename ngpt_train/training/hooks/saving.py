"""When a run saves: every checkpoint.every steps, at its end, and again soon after a save that has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ngpt_train.core.errors import DataError
from ngpt_train.core.recorded import ALARM
from ngpt_train.data.loader import merged
from ngpt_train.training.checkpoint.background import Saves
from ngpt_train.training.hooks.hook import Hook, TrainingRun, due

if TYPE_CHECKING:
    from ngpt_train.training.checkpoint.save import Checkpoints

ALARMING = 3  # failures in a row
MOST_AT_THE_END = 3  # attempts to save the last step
PAUSE = 1.0  # seconds between them
SOONER = 10  # the next attempt comes after checkpoint.every / SOONER steps


class SaveCheckpoints(Hook):
    """Saves beside training, or while it waits (checkpoint.async). After a failure the run goes on and tries again
    soon; the third in a row is an alarm. The last step of a start must be saved, or the start fails.

    Nothing is saved while steps are skipped, because the weights may be the reason. Only the planned end is saved after
    one skipped step: the same command could not get beyond it.
    """

    def __init__(
        self,
        run: TrainingRun,
        checkpoints: Checkpoints,
        saved: Callable[[Path], None],
        add_files: Callable[[Path], None],
    ) -> None:
        """saved: called on rank 0 with each complete checkpoint. add_files: writes more files into a checkpoint, on
        rank 0. A collective call."""
        self._saves = Saves(checkpoints, run.state, saved, run.say)
        self.has_failed = self._saves.has_failed
        self._add_files = add_files
        self._every = run.state.config.checkpoint.every
        self._failures = 0  # in a row
        self._again: int | None = None  # a failed save is tried again after this step

    def start(self, run: TrainingRun) -> None:
        run.say(self._saves.described)

    def waits(self, run: TrainingRun) -> bool:
        return due(run.step, self._every)

    def after_step(self, run: TrainingRun) -> None:
        run.saving |= due(run.step, self._every) or (self._again is not None and run.step >= self._again)

    def save(self, run: TrainingRun) -> None:
        if run.skipped and run.step < run.last:
            skipped = f"the gradients of the last {run.skipped} steps were not finite"
            run.warn(f"no checkpoint at step {run.step}: {skipped}.")
            return
        assert run.position is not None
        assert run.result is not None
        loss = float(run.result.loss)
        with run.during("the checkpoint of step", run.step):
            self._settle(run, f"the checkpoint of step {run.step}")
            for left in reversed(range(MOST_AT_THE_END if run.ends else 1)):
                try:
                    position = merged(run.state.world.gather(run.position))
                    self._saves.save(run.state, position, self._add_files, loss)
                    self._again = None
                    if run.ends:
                        self._saves.settle()
                    return
                except DataError as error:
                    if run.ends and not left:
                        raise
                    self._tell(run, error, at_the_end=run.ends)
                    time.sleep(PAUSE if run.ends else 0)

    def settle(self, run: TrainingRun, waiting: str = "") -> None:
        """Waits for the save under way, and says so with the reason `waiting`. Warns of a failure. Collective."""
        with run.during("the checkpoint of step", run.step):
            self._settle(run, waiting)

    def _settle(self, run: TrainingRun, waiting: str) -> None:
        try:
            if self._saves.settle(waiting):
                self._failures, self._again = 0, None
        except DataError as error:
            self._tell(run, error, at_the_end=False)

    def _tell(self, run: TrainingRun, error: DataError, at_the_end: bool) -> None:
        self._failures += 1
        self._again = run.step + max(1, self._every // SOONER)
        again = f"Training goes on; the next attempt follows step {self._again}."
        text = f"{error} {'It is tried again.' if at_the_end else again}"
        if self._failures % ALARMING:
            run.warn(text)
        else:
            in_a_row = f"{self._failures} saves in a row have failed"
            run.say(f"{ALARM}{in_a_row}, and unsaved steps are lost if the run ends. {text}")

    def finish(self, run: TrainingRun) -> None:
        self._saves.settle()

    def close(self, run: TrainingRun) -> None:
        with run.during("the checkpoint of step", run.step):
            self._saves.close()
