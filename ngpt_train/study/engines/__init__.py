"""Engines run the points of a study: on this machine, or on a cluster."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ngpt_train.study.points import Point

LOGS = "logs"  # directory of a study with the output of each run


@dataclass(frozen=True)
class Job:
    """A run to make. arguments: of `train`, with the options --config-dir and --plugin."""

    point: Point
    run: Path  # its directory
    arguments: tuple[str, ...]

    @property
    def log(self) -> Path:
        """The file for the output of the run, in a directory that exists."""
        log = self.run.parent.parent / LOGS / f"{self.run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return log


def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str], directory: str | None = None
) -> subprocess.Popen[bytes]:
    """A process with its output at the end of `log`. It has its own process group, so that a signal for the study or
    for the job reaches it once, through the engine."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


@dataclass(frozen=True)
class Ended:
    """A job whose process has ended. how: "killed by SIGKILL", for example, or the last line of the output. code: the
    exit code of `train`; None if it is unknown, or after a signal."""

    job: Job
    code: int | None
    how: str


class Engine(Protocol):
    """Runs jobs side by side."""

    jobs: int  # side by side at most
    threads: int  # OMP_NUM_THREADS of each process of a run

    def room(self) -> int:
        """The number of jobs that may be started now."""
        ...

    def start(self, job: Job) -> None: ...

    def running(self) -> Sequence[Job]:
        """The started jobs, in a queue or running, whose end `ended` has not returned."""
        ...

    def ended(self, seconds: float) -> list[Ended]:
        """The jobs that have ended since the last call. Waits for one, this number of seconds at most."""
        ...

    def stop(self) -> None:
        """Asks all jobs to save and end; `ended` returns them. The jobs of a cluster continue, and leave `running`."""
        ...
