"""Ends `bench gpu` within its budget even if something hangs, with the results so far."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ngpt_train.bench.gpu.caches import store

CUT_OFF = 5  # exit code
LAST_SECOND = 1.0
STDERR = 2  # file descriptor


class Bounded(Protocol):
    """The methods of `protocol.Protocol` that this file calls. started: of time.monotonic(); budget: seconds."""

    started: float
    budget: float

    def cut_off(self) -> None: ...

    def write(self, patience: float = -1) -> None: ...

    def print_tables(self) -> None: ...


@contextlib.contextmanager
def ending_in_time(bounded: Bounded, directory: Path, archive: Path) -> Iterator[None]:
    """Ends the process, with exit code CUT_OFF, if the body is still running shortly before the budget is over.

    Before that it writes bench.json, prints the tables and stores the caches in `directory` to `archive`. A thread does
    this, because code that waits for a device or a compiler lets other threads run. Code that does not let them run is
    ended by faulthandler one second before the budget is over, with a traceback and exit code 1.
    """
    ended = threading.Lock()
    ending_seconds = min(8.0, bounded.budget / 8)  # for all that cut_off does

    def cut_off() -> None:
        if not ended.acquire(blocking=False):
            return
        with contextlib.suppress(Exception):  # the body may change the results while they are written
            bounded.cut_off()
            bounded.write(patience=ending_seconds / 4)  # the body may hang while it writes
        with contextlib.suppress(Exception):
            bounded.print_tables()
        sys.stdout.flush()
        with contextlib.suppress(Exception):  # a compiler may still be writing files
            store(directory, archive)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(CUT_OFF)

    left = bounded.started + bounded.budget - time.monotonic()
    timer = threading.Timer(max(0.0, left - ending_seconds), cut_off)
    timer.daemon = True
    timer.start()
    # By its number, because sys.stderr may be an object without a file.
    faulthandler.dump_traceback_later(max(LAST_SECOND, left - LAST_SECOND), exit=True, file=STDERR)
    try:
        yield
    finally:
        ended.acquire()  # held by cut_off, once it has begun, until the process ends
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
