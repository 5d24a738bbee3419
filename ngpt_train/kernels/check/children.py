"""Runs the checks in processes of their own (`__main__.py` beside this file): a kernel may crash one, or hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ngpt_train
from ngpt_train.kernels.check.calls import Call

START_SECONDS = 180.0  # to import torch, perhaps from a slow disk, and to reach the GPU
WORK_SECONDS = {"check": 120.0, "times": 180.0}  # of one call; most of it is for the compiler
UNUSABLE = 3  # exit code of a process whose GPU no longer works for it


@dataclass(frozen=True)
class Request:
    """The task of a process. compiled: with compiled blocks. times: kernels are timed, too."""

    device: str
    dtype: str
    attention: str
    d_head: int
    compiled: bool
    times: bool


@dataclass
class Finding:
    """The result of checking one call of a kernel on this machine."""

    error: float | None = None  # the largest relative error of an output or a gradient
    problem: str | None = "it was not checked"  # why the kernel must not run, in words; None: it is right
    lasting: bool = False  # whether another check would find the same
    seconds: float | None = None  # that the check took, with compilation
    us: float | None = None  # microseconds of the kernel, forward and backward
    plain_us: float | None = None  # of plain PyTorch in its place
    untimed: str | None = None  # why there are no times, in words


def findings(calls: Sequence[Call], request: Request) -> list[Finding]:
    """The finding of each call. A process that ends or hangs at one is followed by another for the rest."""
    found = [Finding() for _ in calls]
    todo = list(range(len(calls)))
    while todo:
        done = _one_process([calls[n] for n in todo], request, [found[n] for n in todo])
        todo = todo[done:]
    return found


def _one_process(calls: Sequence[Call], request: Request, found: Sequence[Finding]) -> int:
    """Fills in `found`; returns how many calls are settled, at least one."""
    package = Path(ngpt_train.__file__).resolve().parent
    paths = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": f"{package.parent}{os.pathsep + paths if paths else ''}"}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            # -P: the code that this process runs, not what lies in the current directory.
            [sys.executable, "-P", "-m", "ngpt_train.kernels.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,  # so that the compilers that it starts end with it
        )
        try:
            return _followed(process, calls, request, found, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _followed(
    process: subprocess.Popen[str],
    calls: Sequence[Call],
    request: Request,
    found: Sequence[Finding],
    errors: IO[str],
) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(vars(request) | {"calls": [call.json() for call in calls]}) + "\n")
        process.stdin.flush()
    at, doing, limit = 0, "start", START_SECONDS
    lines = Lines(process.stdout)
    while (line := lines.next(limit)) is not None:
        if not line:
            break
        told = json.loads(line)
        if "doing" in told:
            at, doing = told["at"], told["doing"]
            limit = WORK_SECONDS[doing]
            continue
        for name, value in told.items():
            if name != "at":
                setattr(found[told["at"]], name, value)
        doing = "next"
    hung = line is None
    if hung:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if doing == "times":  # it is right, and stays without times
        found[at].untimed = "timing it did not end" if hung else f"timing it ended its process ({how(code)})"
    elif doing == "check":
        ended = f"it did not end within {limit:g} seconds" if hung else f"it ended its process: {how(code)}"
        found[at].problem = ended + last(errors)
        found[at].lasting = not hung  # a machine that was busy may not be so next time
    elif doing == "start":
        for one in found:
            one.problem = f"the process that checks did not start: {'too slow' if hung else how(code)}{last(errors)}"
        return len(calls)
    return at + 1 if code or hung else len(calls)


class Lines:
    """The lines of a pipe, each waited for with a time limit."""

    def __init__(self, pipe: IO[str]) -> None:
        self.pipe, self.rest = pipe, b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(pipe, selectors.EVENT_READ)

    def next(self, seconds: float) -> str | None:
        """The next line; empty at the end of the pipe; None where there is none in time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            if not self.selector.select(max(0.0, deadline - time.monotonic())):
                return None
            part = os.read(self.pipe.fileno(), 65536)
            if not part:
                return ""
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode()


def how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def last(errors: IO[str]) -> str:
    """The last line that the process wrote to its errors, for a message; empty without one."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read()[-4000:].splitlines() if line.strip()]
    return f", {lines[-1][:200]}" if lines else ""


def as_json(found: Finding) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if value is not None}
