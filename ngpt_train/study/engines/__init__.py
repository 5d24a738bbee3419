"""Engines run the points of a study: on this machine, or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ngpt_train.study.points import Point


@dataclass(frozen=True)
class Job:
    """A run to be made. arguments: of `train`, the options --config-dir and --plugin among them."""

    point: Point
    run: Path  # its directory
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """A job whose process has ended, however. What has become of the run stands in its directory.

    how: in words, where that does not say it, such as "killed by SIGKILL" or the last line that the process wrote.
    code: the exit code of `train`; None where it is not known, or a signal has ended it.
    """

    job: Job
    code: int | None
    how: str


class Engine(Protocol):
    """Runs jobs, several at once."""

    jobs: int  # at most side by side
    threads: int  # OMP_NUM_THREADS of each process of a run

    def room(self) -> int:
        """How many more jobs may be started now."""
        ...

    def start(self, job: Job) -> None: ...

    def running(self) -> Sequence[Job]:
        """The jobs that were started and whose end `ended` has not told; those in a queue, too."""
        ...

    def ended(self, seconds: float) -> list[Ended]:
        """The jobs that have ended since the last call; waits at most so many seconds for one."""
        ...

    def stop(self) -> None:
        """Asks all jobs to save and to end, and `ended` tells of them as they do; a cluster's jobs go on, and are no
        longer among those that are running."""
        ...
