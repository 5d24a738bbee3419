"""The process of a run: its command, and how it has ended.

`python child.py PARENT COMMAND...` becomes the command, and ends with the process PARENT. Each run begins with this
script, so it imports nothing of the package. It is a separate process, because a process with threads can do nothing
safely between fork and exec.
"""

import ctypes
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux' prctl
SAVING_SECONDS = 120.0  # from the request to stop until the kill
_LAST_BYTES = 4096


def ending_with_us() -> list[str]:
    """Arguments in front of a command that make it end with this process."""
    return [sys.executable, "-S", __file__, str(os.getpid())]  # -S: it needs no packages, and begins sooner


def launcher(ranks: int) -> list[str]:
    """The command before the name of a module, to start it on this number of ranks."""
    if ranks < 2:
        return [sys.executable, "-m"]
    # After SIGTERM the ranks have as many seconds to save as a run of one process.
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--shutdown-timeout={SAVING_SECONDS:.0f}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m"]


def end_of(code: int, log: Path) -> str:
    """How a process has ended: by a signal, else with the last line of its output."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else last_line(log)


def last_line(log: Path) -> str:
    """The last line with an error, else the last line; with a remark if the disk is too full for more."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error")]
        said = (errors or lines or [""])[-1].strip()[:500]
        is_full = shutil.disk_usage(log.parent).free < _LAST_BYTES
        return f"the disk of {log.parent} is full; before that: {said or 'nothing'}" if is_full else said
    return ""


def main(parent: int, command: list[str]) -> None:
    """On Linux SIGTERM comes when `parent` ends, and the run saves. Elsewhere it goes on, and the next start waits."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
