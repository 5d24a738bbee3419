"""Studies that are killed: their processes, and those of their runs."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ngpt_train.core.files import json_lines
from tests.processes import fork_server

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


def has_step(run: Path, step: int) -> Callable[[], bool]:
    """Whether a run has recorded a training step from `step` on."""

    def found() -> bool:
        lines = [record for _, record in json_lines(run / "metrics.jsonl")] if (run / "metrics.jsonl").exists() else []
        return any(x is not None and x["kind"] == "train" and x["step"] >= step for x in lines)

    return found


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


def wait_for_no_trainer(directory: Path, what: str = "train") -> None:
    deadline = time.monotonic() + 120
    while list(trainers(directory, what)):
        assert time.monotonic() < deadline, "a run goes on without its study"
        time.sleep(0.1)
