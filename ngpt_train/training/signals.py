"""Stopping a run from outside: SIGTERM, Ctrl-C and the time limit."""

import os
import signal
import time
from types import FrameType
from typing import Any

# torchrun hands the Ctrl-C that its workers also got on to them: within this many seconds a repeated
# SIGINT is that echo, not a second wish.
ECHO_SECONDS = 1.0


class StopRequest:
    """While entered, turns SIGTERM and SIGINT into a wish that the loop reads after each step.

    A second SIGINT ends the process at once, with 130 as shells expect; checkpoints are atomic, so
    nothing saved is harmed. `max_hours` counts from construction.
    """

    def __init__(self, max_hours: float | None) -> None:
        self.deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self.signal_name: str | None = None
        self._first = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
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
