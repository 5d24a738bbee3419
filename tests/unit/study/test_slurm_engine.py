"""Jobs of a cluster, beside a Slurm that is made of small scripts: queued again, found again, never submitted twice."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ngpt_train.config import ConfigError
from ngpt_train.config.sections.studies import SlurmConfig, StudyConfig
from ngpt_train.study.engines import Ended, Job, slurm
from ngpt_train.study.engines.slurm import SlurmEngine, Training, slurm_engine
from ngpt_train.study.points import Point
from tests import fake_slurm

submitit = pytest.importorskip("submitit")

# Stands in for `train`: counts its starts in its directory. The last argument says what to do.
RUN = """\
import os, signal, sys, time
from pathlib import Path
directory, what = Path(sys.argv[-2]), sys.argv[-1]
directory.mkdir(parents=True, exist_ok=True)
starts = len(list(directory.glob("start-*")))
def save(*_):
    directory.joinpath("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
directory.joinpath(f"start-{starts}").write_text(os.environ["OMP_NUM_THREADS"])
if what == "wait" and starts == 0:
    for _ in range(6000):  # a signal just before a long sleep would be handled after it
        time.sleep(0.01)
elif what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "fail":
    print("error: no disk")
    sys.exit(3)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes = tmp_path / "fakes"
    script = tmp_path / "run.py"
    script.write_text(RUN)
    for name, value in fake_slurm.install(fakes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "launcher", lambda ranks: [sys.executable, str(script)])
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "GONE_SECONDS", 1.0)
    return fakes


def engine(directory: Path, **config: object) -> SlurmEngine:
    return slurm_engine(StudyConfig(engine="slurm", **config), directory / "study")  # type: ignore[arg-type]


def job(directory: Path, what: str) -> Job:
    run = directory / "study" / "runs" / what
    return Job(Point(what, 1, (), 0), run, (str(run), what))


def ends(engine: SlurmEngine) -> dict[str, Ended]:
    found: dict[str, Ended] = {}
    deadline = time.monotonic() + 60
    while engine.running():
        assert time.monotonic() < deadline, "jobs that do not end"
        found |= {ended.job.point.arm: ended for ended in engine.ended(0.5)}
    return found


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def n_submitted(fakes: Path) -> int:
    return len(list(fakes.glob("script-*")))


def test_ends_are_told(tmp_path: Path, fakes: Path) -> None:
    """Caught: an exit code that is lost on the node; a job that ends without a word and is waited for for ever."""
    cluster = engine(tmp_path, jobs=3, slurm=SlurmConfig(cpus=6, gpus=0))
    for what in ("good", "die", "fail"):
        cluster.start(job(tmp_path, what))
    assert cluster.room() == 0
    told = {name: (ended.code, ended.how) for name, ended in ends(cluster).items()}
    assert told == {"good": (0, ""), "die": (None, "killed by SIGKILL"), "fail": (3, "error: no disk")}
    assert (tmp_path / "study/runs/good/start-0").read_text() == "6"
    assert "no disk" in (tmp_path / "study/logs/fail.log").read_text()
    assert cluster.room() == 3


def test_a_job_whose_time_is_over_is_queued_again_and_goes_on(tmp_path: Path, fakes: Path) -> None:
    """Caught: a run that is killed before it has saved; a job that counts as ended; a run that dies of the signal."""
    cluster = engine(tmp_path)
    cluster.start(job(tmp_path, "wait"))
    run = tmp_path / "study/runs/wait"
    wait_for(run / "start-0")
    process = int((fakes / "process-101").read_text())
    os.kill(process, signal.SIGUSR2)  # as --signal does
    assert [ended.code for ended in ends(cluster).values()] == [0]
    assert (run / "saved").exists()
    assert (run / "start-1").exists()
    assert n_submitted(fakes) == 1


def test_a_study_that_starts_again_finds_its_jobs(tmp_path: Path, fakes: Path) -> None:
    """Caught: runs that are submitted twice, while they wait and while they run; jobs that are lost by a stop."""
    (fakes / "hold").touch()
    first = engine(tmp_path)
    first.start(job(tmp_path, "wait"))
    first.start(job(tmp_path, "good"))
    first.stop()
    assert first.room() == 0
    assert not first.running(), "a stopped study waits for its jobs"
    second = engine(tmp_path)
    second.start(job(tmp_path, "wait"))
    (fakes / "hold").unlink()
    wait_for(tmp_path / "study/runs/wait/start-0")
    third = engine(tmp_path)
    third.start(job(tmp_path, "wait"))
    os.kill(int((fakes / "process-101").read_text()), signal.SIGUSR2)
    assert [ended.code for ended in ends(third).values()] == [0]
    assert n_submitted(fakes) == 2
    assert len(list((tmp_path / "study/runs/wait").glob("start-*"))) == 2


def test_a_job_that_vanishes_is_told(tmp_path: Path, fakes: Path) -> None:
    """Caught: a node that goes down, and a study that waits for ever; a squeue without an answer that ends all jobs."""
    cluster = engine(tmp_path)
    (fakes / "hold").touch()
    cluster.start(job(tmp_path, "good"))
    (fakes / "no_answer").touch()
    assert cluster.ended(1.5) == []
    (fakes / "no_answer").unlink()
    (fakes / "queue/101").unlink()
    (ended,) = ends(cluster).values()
    assert ended.code is None
    assert "job 101 ended without a result" in ended.how
    (fakes / "hold").unlink()


def test_the_script_says_what_the_keys_say(tmp_path: Path, fakes: Path) -> None:
    config = SlurmConfig("long", "physics", time=90, gpus=2, cpus=16, memory=64, arguments=["--qos=high", "exclusive"])
    cluster = engine(tmp_path, slurm=config)
    cluster.start(job(tmp_path, "good"))
    lines = (fakes / "script-101").read_text().splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    wanted = "partition=long account=physics time=90 gpus-per-node=2 cpus-per-task=16 mem=64G nodes=1 ntasks-per-node=1"
    assert {*wanted.split(), "qos=high", "exclusive", "requeue", "signal=USR2@300"} <= options
    assert not any("wckey" in option for option in options)
    assert cluster.threads == 8
    ends(cluster)


def test_mistakes_are_named(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes / "refuse").touch()
    with pytest.raises(ConfigError, match=r"sbatch refused the job of good-1-seed0.*invalid partition"):
        engine(tmp_path).start(job(tmp_path, "good"))
    for argument, words in (("Q o s", "not an option"), ("output=x", "the study decides")):
        with pytest.raises(ConfigError, match=words):
            engine(tmp_path, slurm=SlurmConfig(arguments=[argument]))
    (fakes / "no_answer").touch()
    with pytest.raises(ConfigError, match="squeue does not answer"):
        engine(tmp_path).start(job(tmp_path, "good"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ConfigError, match="no command sbatch, squeue, srun here"):
        engine(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'ngpt-train\[slurm\]'"):
        engine(tmp_path)


def test_the_job_by_submitits_own_executor(tmp_path: Path, fakes: Path) -> None:
    """Caught: a job that cannot be pickled, or needs files which the node lacks."""
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "run"), "fail"]
    log = tmp_path / "log"
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    done = executor.submit(Training(command, {"OMP_NUM_THREADS": "1"}, str(tmp_path), str(log)))
    assert json.loads(json.dumps(done.result())) == [3, "error: no disk"]
