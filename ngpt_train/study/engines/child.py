"""`python child.py PARENT COMMAND...`: becomes the command, which ends with the process PARENT.

A script that imports nothing of the package, because each run begins with it. It is a process of its own, because
between fork and exec a process that has threads can do nothing safely.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def ending_with_us() -> list[str]:
    """Arguments in front of a command, so that it ends with this process."""
    return [sys.executable, __file__, str(os.getpid())]


def main(parent: int, command: list[str]) -> None:
    """On Linux the kernel will send SIGTERM, upon which a run saves, as soon as `parent` has ended. Elsewhere the run
    goes on, and the study that is started next waits for it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before the request
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
