"""How far `prepare` is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

LINE_SECONDS = 5.0
BAR_SECONDS = 0.2


class Progress:
    """Counts text and estimates when it ends. sizes: of the units, roughly bytes of text, or 1 for each.

    done: units that an earlier start has finished.
    """

    def __init__(self, what: str, sizes: Sequence[int], done: int = 0) -> None:
        self._what, self._sizes = what, sizes
        self._left = sum(sizes[done:])
        self._share = sum(sizes[:done]) / max(1, sum(sizes))
        self._text = [0] * len(sizes)
        self._unit = done
        self.documents = self.bytes = 0
        self._start = self._reported = time.monotonic()
        self._bar, self._task = _bar()
        self._first = done

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._report()
            self._bar.stop()

    def heard(self, unit: int, documents: int, n_bytes: int) -> None:
        """More text of a unit is tokenized."""
        self.documents += documents
        self.bytes += n_bytes
        self._text[unit] += n_bytes
        now = time.monotonic()
        if now - self._reported >= (LINE_SECONDS if self._bar is None else BAR_SECONDS):
            self._reported = now
            self._report()

    def at(self, unit: int) -> None:
        """All units before this one are finished."""
        self._unit = unit

    def fraction(self) -> float | None:
        """Of the text that this start has to do; None while nothing tells how much text there is."""
        finished = sum(self._sizes[self._first : self._unit])
        text = sum(self._text[self._first : self._unit])
        if finished and text:
            return min(1.0, self.bytes / (text / finished * self._left))
        return min(1.0, self.bytes / self._left) if max(self._sizes) > 1 else None

    def _report(self) -> None:
        seconds = max(1e-9, time.monotonic() - self._start)
        fraction = self.fraction()
        left = None if fraction is None else seconds * (1 - fraction) / fraction
        whole = None if fraction is None else self._share + (1 - self._share) * fraction
        words = f"{self.documents:,} documents, {self.bytes / 1e6:,.1f} MB, {self.bytes / 1e6 / seconds:.1f} MB/s"
        if left is not None:
            words += f", {_duration(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._what}: {words}", completed=whole or 0.0)
            self._bar.refresh()
        else:
            logger.info("%s: %s%s", self._what, "" if whole is None else f"{100 * whole:.0f} %, ", words)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _bar() -> tuple[Any, Any]:
    """A bar on the standard error, which is where the log goes; None where it is no terminal that can redraw a line."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or not logger.isEnabledFor(logging.INFO):
        return None, None
    bar = Bar(
        BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False), console=console,
        auto_refresh=False,
    )  # fmt: skip
    bar.start()
    return bar, bar.add_task("", total=1.0)
