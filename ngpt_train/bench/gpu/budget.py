"""The end of `bench gpu`, in time also where something hangs: one long compilation must not cost the table."""

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

CUT_OFF = 5  # the exit code
LAST_SECOND = 1.0
STDERR = 2


class Going(Protocol):
    """What gpu.Protocol is for here."""

    started: float
    budget: float

    def cut_off(self) -> None: ...

    def write(self, patience: float = -1) -> None: ...

    def print_tables(self) -> None: ...


@contextlib.contextmanager
def ending_in_time(going: Going, directory: Path, archive: Path) -> Iterator[None]:
    """Ends the process with CUT_OFF where its body takes too long: with bench.json, tables and the caches of
    `directory` in `archive`. It is a thread that does so, because what waits for a device or a compiler lets threads
    run. What does not is ended by faulthandler, a second before the budget, with a traceback and exit code 1.
    """
    ended = threading.Lock()
    at_the_end = min(8.0, going.budget / 8)  # seconds, for all that cut_off does

    def cut_off() -> None:
        if not ended.acquire(blocking=False):
            return
        with contextlib.suppress(Exception):  # another thread may be changing what is written
            going.cut_off()
            going.write(patience=at_the_end / 4)  # the body may hang while it writes
        with contextlib.suppress(Exception):
            going.print_tables()
        sys.stdout.flush()
        with contextlib.suppress(Exception):  # a compiler may still be writing files
            store(directory, archive)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(CUT_OFF)

    left = going.started + going.budget - time.monotonic()
    timer = threading.Timer(max(0.0, left - at_the_end), cut_off)
    timer.daemon = True
    timer.start()
    # Not sys.stderr, which may be no file.
    faulthandler.dump_traceback_later(max(LAST_SECOND, left - LAST_SECOND), exit=True, file=STDERR)
    try:
        yield
    finally:
        ended.acquire()  # never had where the process is being ended
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
