"""For the processes that this program starts, so that none outlives it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def die_with_parent() -> None:
    """Has Linux kill this process, a stopped one too, as soon as the thread that has started it ends, however that
    happens."""
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """Ends this process, which `multiprocessing` has started, as soon as its parent process has ended, whatever this
    process is doing; on Linux also where it is stopped."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with_parent()
    if os.getppid() != parent.pid:  # it has ended before the request
        os._exit(1)

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
