"""The lock by which one process at a time uses a directory. The kernel drops it when the process ends, however."""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from ngpt_train.core.files import read_whole


class DirectoryLock:
    """The lock of `directory`, its file `lock`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._file: IO[str] | None = None

    def create(self) -> None:
        """Makes the file, if there is none. Raises OSError."""
        self._file = self._path.open("a")

    def take(self) -> None:
        """Takes the lock and writes who holds it into its file, for those who are refused. After `create`. Raises
        BlockingIOError if another process holds it, OSError where the file system has no locks."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            self._sign()
            raise
        self._sign()

    def is_taken(self) -> bool:
        """Whether a process holds the lock."""
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)) as file:  # a pipe would be waited for
                # A shared lock, so that ranks that look at the same time do not refuse each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError:  # no locks on this file system; `take` says so
            return False
        return False

    def holder(self) -> str:
        """Who holds the lock, in words."""
        try:
            return read_whole(self._path, 1 << 10).decode().strip() or "a running process"
        except (OSError, ValueError):
            return "a running process"

    def release(self) -> None:
        """Drops the lock, if this process has it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(0)
            self._file.close()

    def _sign(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
