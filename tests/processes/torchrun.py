"""`python -m tests.processes.torchrun`: torchrun, but its ranks are forks of it, which need not import the trainer."""

import atexit
import os
import signal
import subprocess
import sys
import time

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.processes import fork_server


class Rank:
    """What torchrun needs of the subprocess.Popen of a rank."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become(command, variables)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code


def become(command: list[str], variables: dict[str, str]) -> None:
    """As after an exec: nothing of torchrun's is left open, handled or to be done at the end."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    atexit._clear()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as `python -u`
    fork_server.execute(command, variables)


def start(_: SubprocessHandler, command: tuple[str, ...], variables: dict[str, str]) -> Rank:
    return Rank([word for word in command[1:3] if word not in ("-u", "-m")] + list(command[3:]), variables)


if __name__ == "__main__":
    SubprocessHandler._popen = start  # type: ignore[assignment, method-assign]
    run.main()
