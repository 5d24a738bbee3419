"""Runs on this machine: their share of cores and GPUs, how their ends are told, and that none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ngpt_train.config.sections.studies import StudyConfig
from ngpt_train.study.engines import Ended, Job, local
from ngpt_train.study.engines.local import LocalEngine, local_engine, usable_gpus
from ngpt_train.study.points import Point

# Stands in for `train`. The last argument says what to do.
RUN = """\
import os, signal, sys, time
from pathlib import Path
directory, what = Path(sys.argv[-2]), sys.argv[-1]
def save(*_):
    directory.joinpath("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
directory.mkdir(parents=True, exist_ok=True)
directory.joinpath("environment").write_text(
    f"{os.environ['OMP_NUM_THREADS']} {os.environ.get('CUDA_VISIBLE_DEVICES') or '-'} {sys.argv[1:3]} {os.getpid()}"
)
if what == "wait":
    time.sleep(60)
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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.py"
    path.write_text(RUN)
    monkeypatch.setattr(local, "launcher", lambda ranks: [sys.executable, str(path), str(ranks)])
    return path


def job(directory: Path, name: str, what: str) -> Job:
    run = directory / "study" / "runs" / name
    return Job(Point(name, 1, (), 0), run, (str(run), what))


def all_ended(engine: LocalEngine) -> dict[str, Ended]:
    found = {}
    while engine.running():
        found |= {ended.job.point.arm: ended for ended in engine.ended(1.0)}
    return found


def wait_for(path: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def test_ends_are_told_with_their_reason(tmp_path: Path, script: Path) -> None:
    """Caught: a signal that counts as an exit code; a reason that is lost with the output; too many jobs."""
    engine = LocalEngine(jobs=3, threads=5)
    for what in ("good", "die", "fail"):
        engine.start(job(tmp_path, what, what))
    assert engine.room() == 0
    ended = all_ended(engine)
    assert engine.room() == 3
    told = {name: (x.code, x.how) for name, x in ended.items()}
    assert told == {"good": (0, ""), "die": (None, "killed by SIGKILL"), "fail": (3, "error: no disk")}
    assert "some warning" in (tmp_path / "study" / "logs" / "fail.log").read_text()
    assert (tmp_path / "study" / "runs" / "good" / "environment").read_text().startswith("5 ")


def test_a_run_goes_on_with_its_own_threads(tmp_path: Path, script: Path) -> None:
    """Caught: a run that another study began, or that began on a machine with other cores, whose last digits change
    where it goes on; study.threads that nobody heeds."""
    run = tmp_path / "study" / "runs" / "a"
    for name, threads in (("a", 3), ("b", 5)):
        (tmp_path / "study" / "runs" / name).mkdir(parents=True)
        facts = {"starts": [{"threads": threads}, {"threads": 9}]}
        (tmp_path / "study" / "runs" / name / "run.json").write_text(json.dumps(facts))
    for config, threads in ((StudyConfig(), ["3", "5", "3"]), (StudyConfig(threads=2), ["2", "2", "2"])):
        engine = local_engine(config, [], 8, run.parent)
        for name in "abc":
            engine.start(job(tmp_path, name, "good"))
        all_ended(engine)
        seen = [(run.parent / name / "environment").read_text().split()[0] for name in "abc"]
        assert seen == threads


def test_a_stop_lets_them_save(tmp_path: Path, script: Path) -> None:
    """Caught: processes that are killed, or go on, when a study is stopped; jobs that are started after it."""
    engine = LocalEngine(jobs=3, threads=1)
    for name in ("a", "b"):
        engine.start(job(tmp_path, name, "wait"))
        wait_for(tmp_path / "study" / "runs" / name / "environment")
    assert engine.ended(0.1) == []
    engine.stop()
    assert engine.room() == 0
    assert [x.code for x in all_ended(engine).values()] == [0, 0]
    assert all((tmp_path / "study" / "runs" / name / "saved").exists() for name in "ab")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's request is Linux'")
def test_no_run_outlives_a_killed_study(tmp_path: Path, script: Path) -> None:
    """Caught: a run that continues, unseen, beside the study's next start; a run killed before it has saved."""
    run = tmp_path / "study" / "runs" / "a"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(script), str(run)], cwd=Path(__file__).parents[3])
    wait_for(run / "environment")
    time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(run / "saved", 10)
    child = int((run / "environment").read_text().split()[-1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the run is still there")


def test_gpus_are_divided(tmp_path: Path, script: Path) -> None:
    """Caught: two runs on one GPU while another is idle; a run of several GPUs in one process; GPUs of others."""

    def seen(gpus: list[str], jobs: int) -> list[tuple[str, str]]:
        engine = LocalEngine(jobs, 1, tuple(gpus))
        names = [f"{len(gpus)}-{jobs}-{number}" for number in range(jobs)]
        for name in names:
            engine.start(job(tmp_path, name, "wait"))
        files = [tmp_path / "study" / "runs" / name / "environment" for name in names]
        for file in files:
            wait_for(file)
        time.sleep(0.1)
        engine.stop()
        all_ended(engine)
        return [(file.read_text().split()[1], file.read_text().split("'")[1]) for file in files]

    assert seen(["4", "5", "6", "7"], 2) == [("4,5", "2"), ("6,7", "2")]
    assert seen(["a", "b"], 3) == [("a", "1"), ("b", "1"), ("a", "1")]
    assert seen([], 1) == [(os.environ.get("CUDA_VISIBLE_DEVICES") or "-", "0")]


def test_what_auto_is(tmp_path: Path) -> None:
    def found(config: StudyConfig, gpus: list[str], cores: int) -> tuple[int, int]:
        engine = local_engine(config, gpus, cores, tmp_path / "runs")
        return engine.jobs, engine.threads

    assert found(StudyConfig(), [], 2) == (2, 1)
    assert found(StudyConfig(), [], 64) == (8, 8)
    assert found(StudyConfig(), ["0", "1", "2"], 64) == (3, 21)
    assert found(StudyConfig(jobs=4), [], 2) == (4, 1)
    assert found(StudyConfig(jobs=1, threads=1), [], 2) == (1, 1)
    # Another number of threads would change the losses of a study that has begun.
    for name, text in {"a": "{", "b": '{"starts": []}', "c": '{"starts": [{"threads": 3}]}'}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(text)
    assert found(StudyConfig(jobs=1), [], 2) == (1, 3)
    assert found(StudyConfig(jobs=1, threads=2), [], 2) == (1, 2)
    # A study with its own runs ignores the threads of runs shared with another study.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"starts": [{"threads": 7}]}')
    (tmp_path / "runs" / "a-link").symlink_to(tmp_path / "other")
    assert found(StudyConfig(jobs=1), [], 2) == (1, 3)
    (tmp_path / "gpus" / "0000").mkdir(parents=True)
    assert usable_gpus({}, tmp_path / "gpus") == ["0"]
    assert usable_gpus({}, tmp_path / "none") == []
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "3, MIG-1"}, tmp_path / "gpus") == ["3", "MIG-1"]
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path / "gpus") == []
    assert local.launcher(1) == [sys.executable, "-m"]
    assert "--nproc-per-node=4" in local.launcher(4)
