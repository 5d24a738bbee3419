"""Shows how far `prepare` has come: a bar on a terminal, elsewhere a log line every few seconds."""

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

logger = logging.getLogger(__name__)

LINE_SECONDS = 5.0
BAR_SECONDS = 0.2


class Progress:
    """Counts tokenized text and estimates the time that is left. A context manager, which ends the bar.

    what: the word in front of the line. sizes: of each unit, roughly its bytes of text, or 1 where they are unknown.
    done: the number of units that an earlier start of the same `prepare` finished; they are the first.
    """

    def __init__(self, what: str, sizes: Sequence[int], done: int = 0) -> None:
        self._what, self._sizes = what, sizes
        self._size_to_do = sum(sizes[done:])
        self._share_done_before = sum(sizes[:done]) / max(1, sum(sizes))
        self._bytes_by_unit = [0] * len(sizes)
        self._first = self._n_finished = done
        self.documents = self.bytes = 0  # tokenized by this start
        self._start = self._reported = time.monotonic()
        self._bar, self._task = _bar()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._report()
            self._bar.stop()

    def heard(self, unit: int, documents: int, n_bytes: int) -> None:
        """Counts more text: `documents` documents of `n_bytes` bytes in all, of the unit with that number."""
        self.documents += documents
        self.bytes += n_bytes
        self._bytes_by_unit[unit] += n_bytes
        now = time.monotonic()
        if now - self._reported >= (LINE_SECONDS if self._bar is None else BAR_SECONDS):
            self._reported = now
            self._report()

    def at(self, unit: int) -> None:
        """Notes that all units before this one are finished."""
        self._n_finished = unit

    def fraction(self) -> float | None:
        """The share, 0 to 1, of this start's text that is tokenized; None while the amount of text is unknown."""
        finished_size = sum(self._sizes[self._first : self._n_finished])
        finished_bytes = sum(self._bytes_by_unit[self._first : self._n_finished])
        if finished_size and finished_bytes:
            # Sizes may be of compressed files. The finished units tell how many bytes of text a unit of size is.
            return min(1.0, self.bytes / (finished_bytes / finished_size * self._size_to_do))
        return min(1.0, self.bytes / self._size_to_do) if max(self._sizes) > 1 else None

    def _report(self) -> None:
        seconds = max(1e-9, time.monotonic() - self._start)
        fraction = self.fraction()
        left = seconds * (1 - fraction) / fraction if fraction else None  # documents may be empty
        whole = None if fraction is None else self._share_done_before + (1 - self._share_done_before) * fraction
        words = f"{self.documents:,} documents, {self.bytes / 1e6:,.1f} MB, {self.bytes / 1e6 / seconds:.1f} MB/s"
        if left is not None:
            words += f", {format_seconds(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {words}", completed=whole or 0.0)
            self._bar.refresh()
        else:
            logger.info("%s: %s%s", self._what, "" if whole is None else f"{100 * whole:.0f} %, ", words)


def format_seconds(seconds: float) -> str:
    """A duration in at most two units: 192 -> 3m12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


def _bar() -> tuple[Any, Any]:
    """A bar of rich's on stderr, where the log goes, and its task. (None, None) where stderr is no terminal that can
    redraw a line, or the log leaves out INFO."""
    if not sys.stderr.isatty() or not logger.isEnabledFor(logging.INFO):
        return None, None
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    if console.is_dumb_terminal:
        return None, None
    bar = Bar(
        BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False), console=console,
        auto_refresh=False,
    )  # fmt: skip
    bar.start()
    return bar, bar.add_task("", total=1.0)
