"""Steps that an observer looks at: telemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngpt_train.training.hooks.hook import Hook, Record, TrainingRun, due

if TYPE_CHECKING:
    from ngpt_train.training.step import Observer


class ObservedSteps(Hook):
    """Lets `observer` see every n-th step, and logs its records once the host waits for the device anyway."""

    def __init__(self, observer: Observer, every: int) -> None:
        self._observer, self._every = observer, every
        self._spent: dict[int, Record] = {}  # by steps whose records are not logged yet

    def before_step(self, run: TrainingRun) -> None:
        if due(run.step + 1, self._every):
            run.observer = self._observer

    def after_step(self, run: TrainingRun) -> None:
        if run.observer is self._observer:
            self._spent[run.step] = run.spent()

    def check(self, run: TrainingRun) -> None:
        if run.rests:
            for record in self._observer.records():
                run.log(record | self._spent.pop(record["step"]))
