"""Runs on this machine, and as jobs of a Slurm that is made of small scripts: their share of cores and GPUs, how their
ends are told, that none is left behind, and that no job is submitted twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ngpt_train.config import ConfigError
from ngpt_train.config.sections.studies import SlurmConfig, StudyConfig
from ngpt_train.study.engines import Ended, Engine, Job, child, local, slurm
from ngpt_train.study.engines.local import LocalEngine, local_engine, usable_gpus
from ngpt_train.study.engines.slurm import SlurmEngine, Training, slurm_engine
from ngpt_train.study.points import Point
from tests import fake_slurm

# Stands in for `train`: writes its environment into its directory, and does what the last argument says. A job that
# waits ends at its second start.
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
text = f"{os.environ['OMP_NUM_THREADS']} {os.environ.get('CUDA_VISIBLE_DEVICES') or '-'} {sys.argv[1]} {os.getpid()}"
directory.joinpath("writing").write_text(text)
directory.joinpath("writing").rename(directory / f"start-{starts}")
if what == "wait" and starts == 0:
    for _ in range(6000):  # a signal just before a long sleep would be handled after it
        time.sleep(0.01)
elif what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "fail":
    print("error: no disk\\nsome warning")
    sys.exit(3)
"""
PARENT = """\
import sys, time
from pathlib import Path
from ngpt_train.study.engines import Job, local
from ngpt_train.study.points import Point
local.launcher = lambda ranks: [sys.executable, sys.argv[1]]
run = Path(sys.argv[2])
local.LocalEngine(1, 1).start(Job(Point("a", 1, (), 0), run, (str(run), "wait")))
time.sleep(60)
"""
TOLD = {"good": (0, ""), "die": (None, "killed by SIGKILL"), "fail": (3, "error: no disk")}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.py"
    path.write_text(RUN)
    for engine in (local, slurm):
        monkeypatch.setattr(engine, "launcher", lambda ranks: [sys.executable, str(path), str(ranks)])
    return path


@pytest.fixture
def fakes(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("submitit")
    for name, value in fake_slurm.install(tmp_path / "fakes").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "GONE_SECONDS", 1.0)
    return tmp_path / "fakes"


def cluster(directory: Path, **config: object) -> SlurmEngine:
    return slurm_engine(StudyConfig(engine="slurm", **config), directory / "study")  # type: ignore[arg-type]


def job(directory: Path, name: str, what: str | None = None) -> Job:
    run = directory / "study" / "runs" / name
    return Job(Point(name, 1, (), 0), run, (str(run), what or name))


def ends(engine: Engine) -> dict[str, Ended]:
    found: dict[str, Ended] = {}
    deadline = time.monotonic() + 60
    while engine.running():
        assert time.monotonic() < deadline, "jobs that do not end"
        found |= {ended.job.point.arm: ended for ended in engine.ended(0.5)}
    return found


def wait_for(what: Path | Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not (what.exists() if isinstance(what, Path) else what()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def check_ends(engine: Engine, directory: Path, threads: str) -> None:
    """Caught: a signal that counts as an exit code; a reason or a code that is lost; too many jobs."""
    for what in TOLD:
        engine.start(job(directory, what))
    assert engine.room() == 0
    assert {name: (x.code, x.how) for name, x in ends(engine).items()} == TOLD
    assert engine.room() == 3
    assert "some warning" in (directory / "study/logs/fail.log").read_text()
    assert (directory / "study/runs/good/start-0").read_text().split()[0] == threads


def test_ends_here(tmp_path: Path, script: Path) -> None:
    check_ends(LocalEngine(jobs=3, threads=5), tmp_path, "5")


def test_ends_on_a_cluster(tmp_path: Path, fakes: Path) -> None:
    check_ends(cluster(tmp_path, jobs=3, slurm=SlurmConfig(cpus=6, gpus=0)), tmp_path, "6")


def test_a_run_goes_on_with_its_own_threads(tmp_path: Path, script: Path) -> None:
    """Caught: a run that another study began, or that began on a machine with other cores, whose last digits change
    where it goes on; study.threads that nobody heeds."""
    runs = tmp_path / "study" / "runs"
    for name, threads in (("a", 3), ("b", 5)):
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text(json.dumps({"starts": [{"threads": threads}, {"threads": 9}]}))
    for number, (config, threads) in enumerate(((StudyConfig(), "353"), (StudyConfig(threads=2), "222"))):
        engine = local_engine(config, [], 8, runs)
        for name in "abc":
            engine.start(job(tmp_path, name, "good"))
        ends(engine)
        assert "".join((runs / name / f"start-{number}").read_text()[0] for name in "abc") == threads


def test_a_stop_lets_them_save(tmp_path: Path, script: Path) -> None:
    """Caught: processes that are killed, or go on, when a study is stopped; jobs that are started after it."""
    engine = LocalEngine(jobs=3, threads=1)
    for name in "ab":
        engine.start(job(tmp_path, name, "wait"))
        wait_for(tmp_path / "study/runs" / name / "start-0")
    assert engine.ended(0.1) == []
    engine.stop()
    assert engine.room() == 0
    assert [x.code for x in ends(engine).values()] == [0, 0]
    assert all((tmp_path / "study/runs" / name / "saved").exists() for name in "ab")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's request is Linux'")
def test_no_run_outlives_a_killed_study(tmp_path: Path, script: Path) -> None:
    """Caught: a run that continues, unseen, beside the study's next start; a run killed before it has saved."""
    run = tmp_path / "study" / "runs" / "a"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(script), str(run)], cwd=Path(__file__).parents[3])
    wait_for(run / "start-0")
    parent.kill()
    parent.wait()
    wait_for(run / "saved", 10)
    process = Path("/proc", (run / "start-0").read_text().split()[-1], "stat")
    wait_for(lambda: not process.exists() or process.read_text().split()[2] == "Z", 10)


def test_gpus_are_divided(tmp_path: Path, script: Path) -> None:
    """Caught: two runs on one GPU while another is idle; a run of several GPUs in one process; GPUs of others."""

    def seen(gpus: list[str], jobs: int) -> list[tuple[str, ...]]:
        engine = LocalEngine(jobs, 1, tuple(gpus))
        names = [f"{len(gpus)}-{jobs}-{number}" for number in range(jobs)]
        for name in names:
            engine.start(job(tmp_path, name, "good"))
        ends(engine)
        files = [tmp_path / "study/runs" / name / "start-0" for name in names]
        return [tuple(file.read_text().split()[1:3]) for file in files]

    assert seen(["4", "5", "6", "7"], 2) == [("4,5", "2"), ("6,7", "2")]
    assert seen(["a", "b"], 3) == [("a", "1"), ("b", "1"), ("a", "1")]
    assert seen([], 1) == [(os.environ.get("CUDA_VISIBLE_DEVICES") or "-", "0")]
    (tmp_path / "gpus" / "0000").mkdir(parents=True)
    assert usable_gpus({}, tmp_path / "gpus") == ["0"]
    assert usable_gpus({}, tmp_path / "none") == []
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "3, MIG-1"}, tmp_path / "gpus") == ["3", "MIG-1"]
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path / "gpus") == []
    assert child.launcher(1) == [sys.executable, "-m"]
    assert "--nproc-per-node=4" in child.launcher(4)


def test_what_auto_is(tmp_path: Path) -> None:
    def found(config: StudyConfig, gpus: list[str], cores: int) -> tuple[int, int]:
        engine = local_engine(config, gpus, cores, tmp_path / "runs")
        return engine.jobs, engine.threads

    assert found(StudyConfig(), [], 2) == (2, 1)
    assert found(StudyConfig(), [], 64) == (8, 8)
    assert found(StudyConfig(), ["0", "1", "2"], 64) == (3, 21)
    assert found(StudyConfig(jobs=4), [], 2) == (4, 1)
    # Another number of threads would change the losses of a study that has begun. A study with its own runs ignores
    # the threads of runs shared with another study.
    for name, text in {"a": "{", "b": '{"starts": []}', "c": '{"starts": [{"threads": 3}]}'}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"starts": [{"threads": 7}]}')
    (tmp_path / "runs" / "a-link").symlink_to(tmp_path / "other")
    assert found(StudyConfig(jobs=1), [], 2) == (1, 3)
    assert found(StudyConfig(jobs=1, threads=2), [], 2) == (1, 2)


def test_a_job_whose_time_is_over_is_queued_again_and_goes_on(tmp_path: Path, fakes: Path) -> None:
    """Caught: a run that is killed before it has saved; a job that counts as ended; a run that dies of the signal; runs
    that are submitted twice by a study that starts again, while they wait and while they run; jobs that a stop ends."""
    (fakes / "hold").touch()
    first = cluster(tmp_path)
    first.start(job(tmp_path, "wait"))
    first.start(job(tmp_path, "good"))
    first.stop()
    assert first.room() == 0
    assert not first.running(), "a stopped study waits for its jobs"
    cluster(tmp_path).start(job(tmp_path, "wait"))
    (fakes / "hold").unlink()
    run = tmp_path / "study/runs/wait"
    wait_for(run / "start-0")
    third = cluster(tmp_path)
    third.start(job(tmp_path, "wait"))
    os.kill(int((fakes / "process-101").read_text()), signal.SIGUSR2)  # as --signal does
    assert [ended.code for ended in ends(third).values()] == [0]
    assert sorted(x.name for x in run.iterdir()) == ["saved", "start-0", "start-1"]
    assert len(list(fakes.glob("script-*"))) == 2


def test_a_job_that_vanishes_is_told(tmp_path: Path, fakes: Path) -> None:
    """Caught: a node that goes down, and a study that waits for ever; a squeue without an answer that ends all jobs."""
    engine = cluster(tmp_path)
    (fakes / "hold").touch()
    engine.start(job(tmp_path, "good"))
    (fakes / "no_answer").touch()
    assert engine.ended(1.5) == []
    (fakes / "no_answer").unlink()
    (fakes / "queue/101").unlink()
    (ended,) = ends(engine).values()
    assert ended.code is None
    assert "job 101 ended without a result" in ended.how
    (fakes / "hold").unlink()


def test_the_script_says_what_the_keys_say(tmp_path: Path, fakes: Path) -> None:
    config = SlurmConfig("long", "physics", time=90, gpus=2, cpus=16, memory=64, arguments=["--qos=high", "exclusive"])
    engine = cluster(tmp_path, slurm=config)
    engine.start(job(tmp_path, "good"))
    lines = (fakes / "script-101").read_text().splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    wanted = "partition=long account=physics time=90 gpus-per-node=2 cpus-per-task=16 mem=64G nodes=1 ntasks-per-node=1"
    assert {*wanted.split(), "qos=high", "exclusive", "requeue", "signal=USR2@300"} <= options
    assert not any("wckey" in option for option in options)
    assert engine.threads == 8
    ends(engine)


def test_mistakes_are_named(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes / "refuse").touch()
    with pytest.raises(ConfigError, match=r"sbatch refused the job of good-1-seed0.*invalid partition"):
        cluster(tmp_path).start(job(tmp_path, "good"))
    for argument, words in (("Q o s", "not an option"), ("output=x", "the study decides")):
        with pytest.raises(ConfigError, match=words):
            cluster(tmp_path, slurm=SlurmConfig(arguments=[argument]))
    (fakes / "no_answer").touch()
    with pytest.raises(ConfigError, match="squeue does not answer"):
        cluster(tmp_path).start(job(tmp_path, "good"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ConfigError, match="no command sbatch, squeue, srun here"):
        cluster(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'ngpt-train\[slurm\]'"):
        cluster(tmp_path)


def test_the_job_by_submitits_own_executor(tmp_path: Path, script: Path) -> None:
    """Caught: a job that cannot be pickled, or needs files which the node lacks."""
    submitit = pytest.importorskip("submitit")
    command = [sys.executable, str(script), "1", str(tmp_path / "run"), "fail"]
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    done = executor.submit(Training(command, {"OMP_NUM_THREADS": "1"}, str(tmp_path), str(tmp_path / "log")))
    assert json.loads(json.dumps(done.result())) == [3, "error: no disk"]
