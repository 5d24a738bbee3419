"""Shows how far a study is: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ngpt_train.observe.console import Clock, PlainConsole, format_count, format_seconds
from ngpt_train.study.definition import Study, text_of
from ngpt_train.study.points import FAILED, Point, Result
from ngpt_train.study.tuning import Trials, best_values

if TYPE_CHECKING:
    from ngpt_train.study.cost import Cost

LINE_SECONDS = 60.0  # between two lines of how far it is, where nothing else is said
_TABLE_SECONDS = 0.5  # between two drawings of the table


class TimeLeft:
    """Estimates the time that a study still takes: by the seconds of the runs that have ended since this start, before
    by the table of costs, and by how many runs went side by side. Both are means over all of this start, so that no
    single run, and no moment with jobs to spare, moves the estimate far."""

    def __init__(self, expected: Sequence[Cost], jobs: int) -> None:
        self._expected, self._jobs = expected, jobs
        self._by_table = all(cost.hours is not None for cost in expected)
        # Of a run: its seconds by the table, whose arms differ in speed, or else its FLOPs.
        self._work = {
            (cost.arm, cost.budget): 3600 * (cost.hours or 0.0) if self._by_table else cost.flops / cost.runs
            for cost in expected
        }
        self._start: float | None = None
        self._began: dict[Point, float] = {}
        self._seconds = 0.0  # of the runs that began and ended since this start
        self._done = 0.0  # their work

    def update(self, results: Mapping[Point, Result], running: Sequence[Point], now: float) -> None:
        self._start = now if self._start is None else self._start
        for point in running:
            self._began.setdefault(point, now)
        for point in [point for point in self._began if point not in running]:
            began = self._began.pop(point)
            # A failed one ended early. An arm that could not be measured in time is not in the table.
            if point in results and results[point].state != FAILED and (point.arm, point.budget) in self._work:
                self._seconds += now - began
                self._done += self._work[point.arm, point.budget]

    def seconds(
        self, results: Mapping[Point, Result], running: Sequence[Point], waiting: Sequence[Point], now: float
    ) -> float | None:
        """None: not known. Of an arm and budget as many runs are expected as the table of costs says, or more if more
        are wanted."""
        known = all((point.arm, point.budget) in self._work for point in [*running, *waiting])
        if not known or not (self._done or self._by_table):
            return None
        of_work = self._seconds / self._done if self._done else 1.0
        ended = Counter((point.arm, point.budget) for point in results)
        wanted = Counter((point.arm, point.budget) for point in [*running, *waiting])
        left = sum(
            of_work * self._work[at] * max(wanted[at], cost.runs - ended[at])
            for cost in self._expected
            for at in [(cost.arm, cost.budget)]
        )
        of_running = [(of_work * self._work[p.arm, p.budget], now - self._began.get(p, now)) for p in running]
        left -= sum(min(of_one, so_far) for of_one, so_far in of_running)
        longest = max((of_one - so_far for of_one, so_far in of_running), default=0.0)
        return max(left / self._side_by_side(now), longest)

    def _side_by_side(self, now: float) -> float:
        """Runs at once, so far: where a search waits for its last run, jobs are idle, and will be again."""
        elapsed = now - (now if self._start is None else self._start)
        busy = self._seconds + sum(now - began for began in self._began.values())
        return min(max(busy / elapsed, 1.0), self._jobs) if elapsed else self._jobs


class Lines:
    """A line for each thing that happens, and once a minute one of how far the study is, where that has changed."""

    def __init__(self, study: Study, expected: Sequence[Cost], jobs: int) -> None:
        self._study, self._left = study, TimeLeft(expected, jobs)
        self._n_expected = sum(cost.runs for cost in expected)
        self._console = PlainConsole(Clock(0))
        self._said = time.monotonic()
        self._counts = ""  # with the time that is left
        self._news = self._news_said = ""  # without it
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
        self._news = summary(results, running, waiting, self._n_expected, None)
        self._print()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            if self._news != self._news_said:
                self._console.message(self._counts)
                self._news_said = self._news
            bests = [f"  {arm}: {text}" for arm in self._study.arms if (text := best_so_far(self._study, arm, results))]
            if bests != self._bests:
                self._bests = bests
                self._console.message("\n".join(["best so far:", *bests]))

    def say(self, line: str) -> None:
        """Printed at the next update, with counts in which the run that has just ended is done."""
        self._lines.append(line)

    def _print(self) -> None:
        for line in self._lines:
            self._console.message(f"{line}  ({self._counts})" if self._news != self._news_said else line)
            self._news_said = self._news
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
