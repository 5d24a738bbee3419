"""Shows how far a study is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ngpt_train.observe.console import PlainConsole, format_count, format_seconds
from ngpt_train.study.cost import Cost
from ngpt_train.study.definition import Study, text_of
from ngpt_train.study.points import FAILED, Point, Result
from ngpt_train.study.tuning import Trials, best_values

LINE_SECONDS = 60.0  # between two lines of how far it is, where nothing else is said
_TABLE_SECONDS = 0.5  # between two drawings of the table


@dataclass
class TimeLeft:
    """Estimates the time that a study still takes: by the runs that have ended since this start, before by the table of
    costs."""

    expected: Sequence[Cost]
    jobs: int
    _began: dict[Point, float] = field(default_factory=dict)
    _seconds: float = 0.0  # of the runs that began and ended since this start
    _flops: float = 0.0

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], now: float) -> None:
        for point in running:
            self._began.setdefault(point, now)
        for point in [point for point in self._began if point not in running]:
            began = self._began.pop(point)
            if point in results and results[point].state != FAILED:  # a failed one ended early
                self._seconds += now - began
                self._flops += self._flops_of(point.arm, point.budget)

    def seconds(
        self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point], now: float
    ) -> float | None:
        """None: not known. Of an arm and budget as many runs are expected as the table of costs says, or more if more
        are wanted."""
        ended = Counter((point.arm, point.budget) for point in results)
        wanted = Counter((point.arm, point.budget) for point in [*running, *waiting])
        left = 0.0
        for cost in self.expected:
            at = cost.arm, cost.budget
            of_one = self._seconds_of(cost)
            if of_one is None:
                return None
            left += of_one * max(wanted[at], cost.runs - ended[at])
            left -= sum(min(of_one, now - self._began.get(p, now)) for p in running if (p.arm, p.budget) == at)
        return left / max(1, min(self.jobs, len(running) + len(waiting)))

    def _seconds_of(self, cost: Cost) -> float | None:
        if self._flops:
            return self._seconds / self._flops * self._flops_of(cost.arm, cost.budget)
        return None if cost.hours is None else 3600 * cost.hours

    def _flops_of(self, arm: str, budget: int) -> float:
        """Of one run."""
        return next(cost.flops / cost.runs for cost in self.expected if (cost.arm, cost.budget) == (arm, budget))


class Lines:
    """A line for each thing that happens, and one a minute that says how far the study is."""

    def __init__(self, study: Study, expected: Sequence[Cost], jobs: int) -> None:
        self._study, self._left = study, TimeLeft(expected, jobs)
        self._n_expected = sum(cost.runs for cost in expected)
        self._console = PlainConsole(0)
        self._said = time.monotonic()
        self._counts = self._counts_said = ""
        self._bests: list[str] = []
        self._lines: list[str] = []  # still to be printed

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._print()

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point]) -> None:
        now = time.monotonic()
        self._left.update(results, running, now)
        left = self._left.seconds(results, running, waiting, now)
        self._counts = summary(results, running, waiting, self._n_expected, left)
        self._print()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            self._console.message(self._counts)
            bests = [f"  {arm}: {text}" for arm in self._study.arms if (text := best_so_far(self._study, arm, results))]
            if bests != self._bests:
                self._bests = bests
                self._console.message("\n".join(["best so far:", *bests]))

    def say(self, line: str) -> None:
        """Printed at the next update, with counts in which the run that has just ended is done."""
        self._lines.append(line)

    def _print(self) -> None:
        for line in self._lines:
            self._console.message(f"{line}  ({self._counts})" if self._counts != self._counts_said else line)
            self._counts_said = self._counts
        self._lines.clear()


class Table:
    """A table that is drawn anew; what happens scrolls above it."""

    def __init__(self, study: Study, expected: Sequence[Cost], jobs: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._study, self._left = study, TimeLeft(expected, jobs)
        self._n_expected = sum(cost.runs for cost in expected)
        self._live = Live(console=Console(highlight=False), auto_refresh=False)
        self._drawn = -math.inf

    def __enter__(self) -> Table:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point]) -> None:
        now = time.monotonic()
        self._left.update(results, running, now)
        if now - self._drawn >= _TABLE_SECONDS or not (running or waiting):
            self._drawn = now
            left = self._left.seconds(results, running, waiting, now)
            caption = summary(results, running, waiting, self._n_expected, left)
            self._live.update(table(self._study, results, running, waiting, caption), refresh=True)

    def say(self, line: str) -> None:
        # Not as markup: a path or a reason may hold square brackets.
        self._live.console.print(line, markup=False, soft_wrap=True)


def progress_of(study: Study, expected: Sequence[Cost], jobs: int) -> Table | Lines:
    """The live table if standard output is a terminal that can redraw lines, else plain lines."""
    from rich.console import Console

    if sys.stdout.isatty() and not Console().is_dumb_terminal:
        return Table(study, expected, jobs)
    return Lines(study, expected, jobs)


def table(
    study: Study, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point], caption: str
) -> Any:
    """A line for each arm, as a table of rich's."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(study.name), caption=Text(caption), title_justify="left", caption_justify="left")
    drawn.add_column("arm")
    for title in ("done", "failed", "running", "waiting"):
        drawn.add_column(title, justify="right")
    drawn.add_column("best so far")
    failed = Counter(point.arm for point, result in results.items() if result.state == FAILED)
    ended, runs, waits = (Counter(point.arm for point in points) for points in (results, running, waiting))
    for arm in study.arms:
        counts = (ended[arm] - failed[arm], failed[arm], runs[arm], waits[arm])
        drawn.add_row(Text(arm), *map(str, counts), Text(best_so_far(study, arm, results)))
    return drawn


def summary(
    results: Mapping[Point, Result],
    running: Sequence[Point],
    waiting: Sequence[Point],
    n_expected: int,
    seconds_left: float | None,
) -> str:
    """`14 of some 40 runs done, 1 failed, 2 running, 3 waiting, some 1h20m left`. Waiting are those that could run
    now; which runs come later depends on the losses of these."""
    n_failed = sum(result.state == FAILED for result in results.values())
    n_expected = max(n_expected, len(results) + len(running) + len(waiting))
    words = [f"{len(results) - n_failed} of some {n_expected} runs done"]
    words += [f"{n_failed} failed"] if n_failed else []
    words += [f"{len(running)} running", f"{len(waiting)} waiting"]
    if seconds_left is not None and (running or waiting):
        words.append(f"some {format_seconds(max(0.0, seconds_left))} left")
    return ", ".join(words)


def best_so_far(study: Study, arm: str, results: Mapping[Point, Result]) -> str:
    """`loss 3.4312 at 819k tokens with lr=0.002 (2 of 3 seeds)`, at the largest budget that has a loss."""
    for budget in reversed(study.budgets):
        trials: Trials = {}
        for point, result in results.items():
            if (point.arm, point.budget) == (arm, budget):
                loss = math.inf if result.loss is None else result.loss
                trials.setdefault(point.values, {})[point.seed] = loss
        if best := best_values(trials):
            losses = trials[best].values()
            values = " ".join(f"{key.rpartition('.')[2]}={text_of(value)}" for key, value in best)
            mean = sum(losses) / len(losses)
            at = f"{study.metric} {mean:.4f} at {format_count(budget)} tokens with {values}"
            return f"{at} ({len(losses)} of {len(study.seeds)} seeds)"
    return ""
