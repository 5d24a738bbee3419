"""Runs the points of a study on this machine, side by side, each in its own process."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ngpt_train.config.keys import AUTO
from ngpt_train.config.sections.studies import StudyConfig
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.study.engines import Ended, Job, started
from ngpt_train.study.engines.child import SAVING_SECONDS, end_of, ending_with_us, launcher

MOST_JOBS = 8  # of study.jobs=auto on CPUs: each process loads torch, half a GB
_LOOK_SECONDS = 0.1


@dataclass
class _Process:
    job: Job
    devices: tuple[str, ...]
    popen: subprocess.Popen[bytes]


@dataclass
class LocalEngine:
    """Processes of `python -m ngpt_train train`. They save and end when this process ends, however it ends."""

    jobs: int
    threads: int
    gpus: tuple[str, ...] = ()
    keeps_threads: bool = False  # True: a resumed run has its first number of threads instead of `threads`
    _processes: list[_Process] = field(default_factory=list)
    _asked_to_stop: float | None = None

    def room(self) -> int:
        return self.jobs - len(self._processes) if self._asked_to_stop is None else 0

    def start(self, job: Job) -> None:
        # An equal share of the GPUs, or, with fewer GPUs than runs, the least used one.
        in_use = [device for process in self._processes for device in process.devices]
        devices = tuple(sorted(self.gpus, key=in_use.count)[: max(1, len(self.gpus) // self.jobs)])
        threads = (began_with(job.run) if self.keeps_threads else None) or self.threads
        chosen = {"OMP_NUM_THREADS": str(threads)}
        if self.gpus:
            chosen["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        command = [*ending_with_us(), *launcher(len(devices)), "ngpt_train", "train", *job.arguments]
        self._processes.append(_Process(job, devices, started(command, job.log, chosen)))

    def running(self) -> Sequence[Job]:
        return [process.job for process in self._processes]

    def ended(self, seconds: float) -> list[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            over = [process for process in self._processes if process.popen.poll() is not None]
            if over or time.monotonic() >= deadline:
                break
            if self._asked_to_stop is not None and time.monotonic() > self._asked_to_stop + SAVING_SECONDS:
                for process in self._processes:
                    with suppress(ProcessLookupError):
                        os.killpg(process.popen.pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)
        self._processes = [process for process in self._processes if process not in over]
        codes = [(process.job, process.popen.returncode) for process in over]
        return [Ended(job, code if code >= 0 else None, end_of(code, job.log)) for job, code in codes]

    def stop(self) -> None:
        if self._asked_to_stop is None:
            self._asked_to_stop = time.monotonic()
            for process in self._processes:
                process.popen.send_signal(signal.SIGTERM)


def local_engine(config: StudyConfig, gpus: Sequence[str], cores: int, runs: Path) -> LocalEngine:
    """The engine of `study.jobs` and `study.threads` on a machine with these GPUs and cores. runs: the directory of the
    study's runs, which keep their number of threads, because it changes the last digits of losses."""
    jobs = (len(gpus) or min(cores, MOST_JOBS)) if config.jobs == AUTO else int(config.jobs)
    if config.threads != AUTO:
        return LocalEngine(jobs, int(config.threads), tuple(gpus))
    return LocalEngine(jobs, threads_of(runs) or max(1, cores // jobs), tuple(gpus), keeps_threads=True)


def threads_of(runs: Path) -> int | None:
    """The first number of threads of a run in the directory, of a shared one last; None if no run has begun."""
    paths = sorted(runs.glob("*/run.json"), key=lambda path: (path.parent.is_symlink(), path))
    return next((threads for path in paths if (threads := began_with(path.parent)) is not None), None)


def began_with(run: Path) -> int | None:
    """The first number of threads of a run, by its run.json; None if unknown."""
    with suppress(DataError, LookupError, TypeError):
        threads = read_json(run / "run.json")["starts"][0]["threads"]
        return threads if type(threads) is int and threads > 0 else None
    return None


def usable_gpus(
    environment: Mapping[str, str] = os.environ, driver: Path = Path("/proc/driver/nvidia/gpus")
) -> list[str]:
    """The GPUs by their names in CUDA_VISIBLE_DEVICES, without loading torch."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        named = [name.strip() for name in visible.split(",")]
        return [name for name in named if name and name != "-1"]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []
