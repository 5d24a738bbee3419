"""Runs a check in its own process with a time limit, so that a hang or a crash does not end the doctor."""

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import IO, Any, NoReturn

from ngpt_train.core.errors import in_one_line

Report = Callable[..., None]  # report(name=fact, ...): a reported fact survives a later crash
Look = Callable[[Report], None]
LAST_WORDS = 0.3  # seconds before the limit: a check that still runs writes its traceback
BURIAL = 1.0  # seconds to wait for a killed process; a process that waits for a lost disk never ends


class Check:
    """A look that runs in its own process.

    The process is forked, because another import of torch takes seconds, and minutes if many ranks share a slow disk.
    So the parent must not have used a GPU.
    """

    def __init__(self, look: Look, seconds: float) -> None:
        self._begin, self._seconds = time.monotonic(), seconds
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until `result`)
        self._end, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns of threads. Those of torch's store and of the launcher's watch hold no lock of a check.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(self._end)
            _in_child(look, write, self._said, seconds)
        os.close(write)

    def result(self) -> tuple[dict[str, Any], str | None, float]:
        """Waits for the end. Returns the facts, the problem (None if the look is complete), and the seconds."""
        facts: dict[str, Any] = {}
        problem: str | None = None
        too_long = f"it took longer than {self._seconds:.0f} s"
        lines, content = b"", b"any"
        while content:
            left = self._begin + self._seconds - time.monotonic()
            if not select.select([self._end], [], [], max(0.0, left))[0]:
                problem = too_long + self._where()
                break
            content = os.read(self._end, 1 << 16)
            lines += content
        os.close(self._end)
        signalled = self._bury(at_once=problem is not None)
        for line in lines.split(b"\n")[:-1]:
            said = json.loads(line)
            problem = said.pop("problem", problem)
            facts |= said
        if problem is None and signalled:
            ended = f"it was ended by {signal.Signals(signalled).name}"
            problem = (too_long if signalled == signal.SIGALRM else ended) + self._where()
        self._said.close()
        return facts, problem, time.monotonic() - self._begin

    def _bury(self, at_once: bool) -> int:
        """Ends the process and its children. Returns the number of the signal that ended it, or 0."""
        if at_once:
            self._kill()
        deadline, gone, status = time.monotonic() + BURIAL, 0, 0
        while not gone and time.monotonic() < deadline:
            gone, status = os.waitpid(self._pid, os.WNOHANG)
            time.sleep(0.0 if gone else 0.005)
        self._kill()  # children that are left
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)

    def _where(self) -> str:
        """The innermost line of the package in the traceback of the crash or the hang."""
        self._said.seek(0)
        found = re.findall(r'File ".*/(ngpt_train/[^"]+)", line (\d+) in (\w+)', self._said.read())
        return f", in {found[0][2]} ({found[0][0]}:{found[0][1]})" if found else ""


def _in_child(look: Look, write: int, said: IO[str], seconds: float) -> NoReturn:
    def report(**facts: Any) -> None:
        os.write(write, (json.dumps(facts, default=str) + "\n").encode())

    try:
        os.setsid()  # a process group with its children, to be killed together
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(seconds) + 5)  # ends it even if the parent was killed
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        faulthandler.enable(said)
        faulthandler.dump_traceback_later(max(0.1, seconds - LAST_WORDS), file=said)
        look(report)
    except BaseException as error:
        report(problem=in_one_line(error))
    finally:
        os._exit(0)  # without the interpreter's exit handlers, which are the parent's


def first_line(error: BaseException | str) -> str:
    """The first line of an error, cut to 300 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 300 else lines[0][:297] + "..."
