"""`python child.py PARENT COMMAND...`: becomes the command, and ends with the process PARENT.

Each run begins with this script, so it imports nothing of the package. It is a separate process, because a process with
threads can do nothing safely between fork and exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def ending_with_us() -> list[str]:
    """Arguments in front of a command that make it end with this process."""
    return [sys.executable, __file__, str(os.getpid())]


def main(parent: int, command: list[str]) -> None:
    """On Linux the kernel sends SIGTERM when `parent` ends, and the run saves. Elsewhere the run continues, and the
    next start of the study waits for it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
