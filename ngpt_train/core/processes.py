"""For the processes that this program starts with `multiprocessing`."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Ends this process, with exit code 1, as soon as its parent process has ended, whatever this process is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
