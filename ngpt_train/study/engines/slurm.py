"""Runs the points of a study on a Slurm cluster, each as a job of submitit.

The queue is the record of submitted jobs: the name of a job contains its run directory. A study that starts again finds
its jobs there, even after a kill, and submits none twice.
"""

import getpass
import hashlib
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.sections.studies import SlurmConfig, StudyConfig
from ngpt_train.config.validate import mistake
from ngpt_train.study.engines import Ended, Job, started
from ngpt_train.study.engines.child import end_of, last_line, launcher

logger = logging.getLogger(__name__)

FOLDER = "slurm"  # directory of a study with the files of submitit
MOST_JOBS = 100  # of study.jobs=auto
SAVING_SECONDS = 300  # for a run to save before the end of its job's time
QUEUED_AGAIN = 20  # times at most, for jobs whose time is over
LOOK_SECONDS = 5.0  # between two looks at the queue, which other users ask too
GONE_SECONDS = 20.0  # from a job's end until its result must have reached this machine's file system
# Options of sbatch that the study sets.
_DECIDED = ("job-name", "output", "error", "signal", "requeue", "nodes", "ntasks-per-node", "array", "open-mode")


@dataclass
class Training:
    """A job, which trains or resumes one run. submitit calls it on the node."""

    command: list[str]
    environment: dict[str, str]
    directory: str  # the working directory of the study
    log: str
    _child: subprocess.Popen[bytes] | None = None
    _is_ending: bool = False

    def __call__(self) -> tuple[int, str]:
        """The exit code of `train`, and its last line."""
        # Slurm sends SIGUSR2 to whole process groups, and would kill a run that does not trap it.
        command = ["sh", "-c", 'trap "" USR2; exec "$@"', "sh", *self.command]
        signal.signal(signal.SIGTERM, self._end)
        self._child = started(command, Path(self.log), self.environment, self.directory)
        # Not `wait`: the handler of SIGUSR2 waits too, and inside a `wait` it would never see the end of the child.
        while (code := self._child.poll()) is None:
            time.sleep(0.1)
        if self._is_ending:
            # scancel or a preemption: Slurm ends this process, and queues a preempted job again unless it has a result.
            time.sleep(SAVING_SECONDS)
        return code, end_of(code, Path(self.log))

    def checkpoint(self) -> Any:
        """Queues the job again. submitit calls it shortly before the end of the job's time."""
        from submitit.helpers import DelayedSubmission

        self._end()
        assert self._child is not None
        deadline = time.monotonic() + SAVING_SECONDS
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.1)
        return DelayedSubmission(Training(self.command, self.environment, self.directory, self.log))

    def _end(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        self._is_ending = True
        if self._child is not None and not self._has_ended():
            os.kill(self._child.pid, signal.SIGTERM)

    def _has_ended(self) -> bool:
        """Unlike `poll`, safe in a signal handler that interrupts `poll`."""
        assert self._child is not None
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True


@dataclass
class _Submitted:
    job: Job
    number: str  # Slurm's
    last_seen: float = field(default_factory=time.monotonic)  # in the queue


@dataclass
class SlurmEngine:
    """Jobs of a Slurm cluster. They outlive this process, and stay in the queue when the study is stopped."""

    jobs: int
    threads: int
    slurm: SlurmConfig
    folder: Path
    _submitted: dict[str, _Submitted] = field(default_factory=dict)  # by name
    _queue: dict[str, str] = field(default_factory=dict)  # _queue[name]: number of the user's job
    _looked: float = -1e9
    _is_stopped: bool = False

    def room(self) -> int:
        return 0 if self._is_stopped else self.jobs - len(self._submitted)

    def start(self, job: Job) -> None:
        """Submits the job, unless it is in the queue already. Raises ConfigError if sbatch refuses it."""
        name = job_name(job.run)
        if time.monotonic() - self._looked > LOOK_SECONDS and not self._look():
            raise mistake("study.engine=slurm: squeue does not answer", "See whether squeue works here")
        if (number := self._queue.get(name)) is not None:
            logger.info("%s: job %s is in the queue already", job.point.directory, number)
        self._submitted[name] = _Submitted(job, number or self._submit(job, name))

    def running(self) -> Sequence[Job]:
        return [] if self._is_stopped else [submitted.job for submitted in self._submitted.values()]

    def ended(self, seconds: float) -> list[Ended]:
        deadline = time.monotonic() + seconds
        while not (over := self._over()) and time.monotonic() < deadline:
            time.sleep(min(0.1, seconds))
        for one in over:
            del self._submitted[job_name(one.job.run)]
        return over

    def stop(self) -> None:
        if not self._is_stopped and self._submitted:
            numbers = " ".join(submitted.number for submitted in self._submitted.values())
            words = "%d jobs stay in the queue, and the same command goes on with them; to end them: scancel %s"
            logger.warning(words, len(self._submitted), numbers)
        self._is_stopped = True

    def _over(self) -> list[Ended]:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._look()
        return [ended for submitted in self._submitted.values() if (ended := self._end_of(submitted)) is not None]

    def _end_of(self, submitted: _Submitted) -> Ended | None:
        result = self.folder / f"{submitted.number}_0_result.pkl"
        if result.exists():
            outcome, value = pickle.loads(result.read_bytes())
            if outcome == "success":
                code, how = value
                return Ended(submitted.job, code if code >= 0 else None, how)
            return Ended(submitted.job, None, str(value).strip().splitlines()[-1])
        if self._looked - submitted.last_seen > GONE_SECONDS:
            logs = self.folder / f"{submitted.number}_0_log.err"
            said = last_line(logs) or "it said nothing"
            return Ended(submitted.job, None, f"job {submitted.number} ended without a result: {said} ({logs})")
        return None

    def _look(self) -> bool:
        """Reads the user's jobs from squeue. False without an answer; then no job counts as gone."""
        command = ["squeue", "--noheader", "--user", getpass.getuser(), "--format=%i|%j"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            return False
        self._looked = time.monotonic()
        lines = [line.strip().split("|", 1) for line in found.stdout.splitlines() if "|" in line]
        self._queue = {name: number for number, name in lines}
        for name, submitted in self._submitted.items():
            if name in self._queue:
                submitted.last_seen = self._looked
        return True

    def _submit(self, job: Job, name: str) -> str:
        import submitit

        executor = submitit.SlurmExecutor(self.folder, max_num_timeout=QUEUED_AGAIN)
        executor.update_parameters(**parameters(self.slurm, name))
        command = [*launcher(self.slurm.gpus), "ngpt_train", "train", *job.arguments]
        environment = {"OMP_NUM_THREADS": str(self.threads)}
        training = Training(command, environment, str(Path.cwd()), str(job.log.absolute()))
        try:
            return str(executor.submit(training).job_id)
        except (subprocess.CalledProcessError, submitit.core.utils.FailedJobError, RuntimeError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
            fix = "Set study.slurm.partition, account, time, gpus, cpus, memory or arguments as your cluster wants them"
            raise mistake(f"study.slurm: sbatch refused the job of {job.point.directory}: {said}", fix) from None


def slurm_engine(config: StudyConfig, study: Path, is_used: bool = True) -> SlurmEngine:
    """The engine of `study.slurm` for the study in the directory `study`. Raises ConfigError for an option of sbatch
    that the study sets, and, if the engine is used, without Slurm or submitit."""
    _extra(config.slurm.arguments)
    if is_used:
        _check_here()
    jobs = MOST_JOBS if config.jobs == AUTO else int(config.jobs)
    cores = config.slurm.cpus // max(1, config.slurm.gpus)
    threads = max(1, cores) if config.threads == AUTO else int(config.threads)
    return SlurmEngine(jobs, threads, config.slurm, (study / FOLDER).absolute())


def _check_here() -> None:
    try:
        import submitit  # noqa: F401
    except ImportError:
        fix = "Install it: pip install 'ngpt-train[slurm]', or set study.engine=local"
        raise mistake("study.engine=slurm: submitit is not installed", fix) from None
    if missing := [command for command in ("sbatch", "squeue", "srun") if shutil.which(command) is None]:
        fix = "Start the study where Slurm's commands are, such as a login node, or set study.engine=local"
        raise mistake(f"study.engine=slurm: no command {', '.join(missing)} here", fix)


def parameters(slurm: SlurmConfig, name: str) -> dict[str, Any]:
    return {
        "job_name": name,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,  # minutes
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": slurm.cpus,
        "gpus_per_node": slurm.gpus or None,
        "mem": f"{slurm.memory}G" if slurm.memory else None,
        "signal_delay_s": SAVING_SECONDS,
        "wckey": None,  # submitit's default is refused by clusters that check wckeys
        "additional_parameters": {"requeue": True, **_extra(slurm.arguments)},
    }


def job_name(run: Path) -> str:
    return f"{run.name}-{hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:10]}"


def _extra(arguments: Sequence[str]) -> Mapping[str, str | bool]:
    """`study.slurm.arguments` by option. Raises ConfigError."""
    options: dict[str, str | bool] = {}
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            fix = "Write options as in [qos=high,exclusive]"
            raise mistake(f"study.slurm.arguments: {argument}: not an option of sbatch", fix)
        if name in _DECIDED:
            raise mistake(f"study.slurm.arguments: {argument}: the study decides it for each run", "Leave it out")
        options[name] = value if equals else True
    return options
