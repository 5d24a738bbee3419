"""Studies that are killed: their processes, and those of their runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.processes import fork_server
from tests.processes.runs import wait_for

SHARED = [
    *("scale=debug", "data=local", "data.val_fraction=0.2", "tokenizer=bytes", "train.micro_rows=2"),
    *("train.device=cpu", "eval.every=50", "eval.rows=8", "checkpoint.every=5", "logging.wandb.mode=disabled"),
]


def begin(verb: str, given: list[str], **variables: str) -> subprocess.Popen[str]:
    """A real process: it is killed, or starts others."""
    return subprocess.Popen(
        [sys.executable, "-m", "ngpt_train", verb, *given],
        env=fork_server.environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(process: subprocess.Popen[str], happened: Callable[[], bool], seconds: float = 900) -> None:
    """Waits until something has happened, as long as the process runs; ends it where that takes too long."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > deadline:
            process.terminate()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.1)


def trainers(directory: Path, what: str = "train") -> Iterator[int]:
    """The processes that train below a directory: `train`, or another module with this name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if what in words and any(str(directory) in word for word in words):
                yield int(entry.name)


@contextlib.contextmanager
def paused(directory: Path) -> Iterator[None]:
    """Inside, the processes that train below a directory are stopped."""
    found = list(trainers(directory))
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in found:
        os.kill(pid, signal.SIGCONT)


def wait_for_no_trainer(directory: Path, what: str = "train") -> None:
    wait_for(lambda: not list(trainers(directory, what)), 120, "a run goes on without its study")
