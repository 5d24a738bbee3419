"""Prints the progress of a study: runs done, the best losses so far, and the time left."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ngpt_train.core.progress import format_seconds
from ngpt_train.observe.console import Clock, PlainConsole, format_count
from ngpt_train.study.definition import Study, text_of
from ngpt_train.study.points import FAILED, Point, Results
from ngpt_train.study.search import Ends
from ngpt_train.study.tuning import Trials, best_values

if TYPE_CHECKING:
    from ngpt_train.study.cost import Cost

LINE_SECONDS = 60.0  # between two lines of counts


class TimeLeft:
    """Estimates the time left from the seconds of ended runs and the number of runs side by side: means over this
    start, which no single run and no idle moment moves far. Before the first run ends, the table of costs stands in."""

    def __init__(self, expected: Sequence[Cost], jobs: int) -> None:
        self._runs, self._jobs = {(cost.arm, cost.budget): cost.runs for cost in expected}, jobs
        self._by_table = all(cost.hours is not None for cost in expected)
        # _work[arm, budget]: seconds of a run by the table, which knows the speed of each arm; else its FLOPs.
        self._work = {
            (cost.arm, cost.budget): 3600 * (cost.hours or 0.0) if self._by_table else cost.flops / cost.runs
            for cost in expected
        }
        self._start: float | None = None
        self._began: dict[Point, float] = {}
        self._seconds = self._done = 0.0  # seconds and work of the runs that began and ended since this start

    def update(self, results: Results, running: Sequence[Point], now: float) -> None:
        self._start = now if self._start is None else self._start
        for point in running:
            self._began.setdefault(point, now)
        for point in [point for point in self._began if point not in running]:
            began = self._began.pop(point)
            # A failed run ended early. The table lacks arms whose measurement took too long.
            if point in results and results[point].state != FAILED and (point.arm, point.budget) in self._work:
                self._seconds += now - began
                self._done += self._work[point.arm, point.budget]

    def seconds(self, results: Results, running: Sequence[Point], waiting: Sequence[Point], now: float) -> float | None:
        """None if unknown. Expects the runs of an arm and budget in the table of costs, or more if more are wanted."""
        known = all((point.arm, point.budget) in self._work for point in [*running, *waiting])
        if not known or not (self._done or self._by_table):
            return None
        of_work = self._seconds / self._done if self._done else 1.0
        ended = Counter((point.arm, point.budget) for point in results)
        wanted = Counter((point.arm, point.budget) for point in [*running, *waiting])
        left = sum(of_work * self._work[at] * max(wanted[at], n - ended[at]) for at, n in self._runs.items())
        of_running = [(of_work * self._work[p.arm, p.budget], now - self._began.get(p, now)) for p in running]
        left -= sum(min(of_one, so_far) for of_one, so_far in of_running)
        longest = max((of_one - so_far for of_one, so_far in of_running), default=0.0)
        return max(left / self._side_by_side(now), longest)

    def _side_by_side(self, now: float) -> float:
        """The mean number of runs at once. Jobs are idle while a search waits for its last run."""
        elapsed = 0.0 if self._start is None else now - self._start
        busy = self._seconds + sum(now - began for began in self._began.values())
        return min(max(busy / elapsed, 1.0), self._jobs) if elapsed else self._jobs


class ProgressLines:
    """Prints a line for each event. Once a minute it prints the counts and the best losses, if they have changed."""

    def __init__(
        self, study: Study, expected: Sequence[Cost], jobs: int, ends: Callable[[Results], Mapping[str, Ends]]
    ) -> None:
        self._study, self._left, self._ends = study, TimeLeft(expected, jobs), ends
        self._n_expected = sum(cost.runs for cost in expected)
        self._console = PlainConsole(Clock(0))
        self._said = time.monotonic()
        self._counts = self._counts_said = ""  # without the time left
        self._time_left: float | None = None
        self._bests: list[str] = []
        self._lines: list[str] = []  # to print at the next update

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *error: object) -> None:
        self._print()

    def update(self, results: Results, running: Sequence[Point], waiting: Sequence[Point]) -> None:
        now = time.monotonic()
        self._left.update(results, running, now)
        self._time_left = self._left.seconds(results, running, waiting, now) if running or waiting else None
        self._counts = summary(results, running, waiting, self._n_expected)
        self._print()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            if self._counts != self._counts_said:
                self._console.message(self._with_time())
            ends = self._ends(results)
            texts = {arm: best_so_far(self._study, arm, results, ends[arm]) for arm in self._study.arms}
            bests = [f"  {arm}: {text}" for arm, text in texts.items() if text]
            if bests != self._bests:
                self._bests = bests
                self._console.message("\n".join(["best so far:", *bests]))

    def say(self, line: str) -> None:
        """Prints the line at the next update, beside counts which include the run that has just ended."""
        self._lines.append(line)

    def _print(self) -> None:
        for line in self._lines:
            self._console.message(f"{line}  ({self._with_time()})" if self._counts != self._counts_said else line)
        self._lines.clear()

    def _with_time(self) -> str:
        self._counts_said = self._counts
        if self._time_left is None:
            return self._counts
        return f"{self._counts}, some {format_seconds(max(0.0, self._time_left))} left"


def summary(results: Results, running: Sequence[Point], waiting: Sequence[Point], n_expected: int) -> str:
    """`14 of some 40 runs done, 1 failed, 2 running, 3 waiting`. Losses of the waiting decide which runs come later."""
    n_failed = sum(result.state == FAILED for result in results.values())
    n_expected = max(n_expected, len(results) + len(running) + len(waiting))
    words = [f"{len(results) - n_failed} of some {n_expected} runs done"]
    words += [f"{n_failed} failed"] if n_failed else []
    return ", ".join([*words, f"{len(running)} running", f"{len(waiting)} waiting"])


def best_so_far(study: Study, arm: str, results: Results, ends: Ends) -> str:
    """`loss 3.4312 at 819k tokens with lr=0.002 (2 of 3 seeds)`, at the largest budget with a loss. ends: the arm's."""
    for budget in reversed(study.budgets):
        trials: Trials = {}
        for point, result in results.items():
            if (point.arm, point.budget) == (arm, budget):
                loss = math.inf if result.loss is None else result.loss
                trials.setdefault(point.values, {})[point.seed] = loss
        if best := best_values(trials, end=ends.get(budget)):
            losses = trials[best].values()
            values = " ".join(f"{key.removeprefix('optim.')}={text_of(value)}" for key, value in best)
            mean = sum(losses) / len(losses)
            at = f"{study.metric} {mean:.4f} at {format_count(budget)} tokens with {values}"
            return f"{at} ({len(losses)} of {len(study.seeds)} seeds)"
    return ""
