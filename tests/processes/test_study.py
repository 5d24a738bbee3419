"""A real study: kills, restarts, refusals, and the report at its end."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import fake_slurm
from tests.processes import runs
from tests.processes.studies import SHARED, begin, paused, trainers, wait_for_no_trainer

pytestmark = pytest.mark.slow

YAML = """\
arms:
  gpt: {model: gpt}
  ngpt: {model: ngpt}
budgets: [51_200]  # 100 steps
seeds: [0]
max_points: 1
"""


def arguments_in(directory: Path, corpus: Path) -> list[str]:
    (directory / "study").mkdir()
    (directory / "study" / "small.yaml").write_text(YAML)
    text = [f"data.path={corpus}", f"data.cache={directory / 'cache'}", f"study.root={directory / 'studies'}"]
    return ["--config-dir", str(directory), "study=small", *SHARED, *text]


@pytest.fixture
def arguments(tmp_path: Path, corpus: Path) -> list[str]:
    return arguments_in(tmp_path, corpus)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The study that nobody has stopped."""
    directory = tmp_path_factory.mktemp("whole")
    study([*arguments_in(directory, corpus), "study.jobs=1", "study.threads=1"])
    return directory / "studies" / "small"


def study(given: list[str], code: int = 0) -> str:
    finished = runs.run("study", given, code=code)
    return finished.stdout if code == 0 else finished.stderr


def losses(directory: Path) -> list[dict[str, Any]]:
    report = json.loads((directory / "report" / "report.json").read_text())
    return sorted(({**loss, "run": Path(loss["run"]).name} for loss in report["losses"]), key=lambda x: str(x["run"]))


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="it looks for the processes in /proc")
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(arguments: list[str], tmp_path: Path, whole: Path) -> None:
    """Caught: a run that goes on without the study, that begins anew or is made twice; a second study beside the first;
    a report that depends on kills."""
    root = tmp_path / "studies" / "small"
    gpt, ngpt = (root / "runs" / name for name in ("gpt-51200-lr0.008-seed0", "ngpt-51200-lr0.02-seed0"))
    given = [*arguments, "study.jobs=1", "study.threads=1"]
    killed = begin("study", given)
    runs.wait_for_step(gpt, 10)
    with paused(root):  # or the run would be at its end before the second study is refused
        assert "is running the study" in study(given, code=2)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    wait_for_no_trainer(root)
    step = runs.end_of(gpt)["step"]
    assert 10 <= step < 100

    stopped = begin("study", given)
    runs.wait_for_step(ngpt, 10)
    stopped.send_signal(signal.SIGINT)
    said, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 0
    assert "interrupted" in said
    assert not list(trainers(root))
    assert runs.began_at(gpt) == [0, step]
    assert runs.end_of(ngpt)["reason"] == "stopped by SIGTERM"

    modified = os.stat(gpt / "metrics.jsonl").st_mtime_ns
    said = study([*given, "study.prompt=a"])
    assert len(runs.starts(ngpt)) == 2
    assert os.stat(gpt / "metrics.jsonl").st_mtime_ns == modified
    assert [line.split()[1] for line in said.splitlines() if line.startswith("--- ")] == ["gpt,", "ngpt,"]
    assert "One seed and one budget: this proves nothing" in said.splitlines()[-1]

    for run in (gpt, ngpt):
        assert runs.numbers(run) == runs.numbers(whole / "runs" / run.name)
    assert losses(root) == losses(whole)
    assert len(losses(root)) == 2


def test_on_a_cluster_it_ends_as_on_this_machine(arguments: list[str], tmp_path: Path, whole: Path) -> None:
    """Caught: jobs that end with the study; runs that are submitted twice; a job whose time is over and that begins
    anew; losses that depend on where the runs were made."""
    pytest.importorskip("submitit")
    fakes = tmp_path / "fakes"
    variables = fake_slurm.install(fakes)
    root = tmp_path / "studies" / "small"
    gpt, ngpt = (root / "runs" / name for name in ("gpt-51200-lr0.008-seed0", "ngpt-51200-lr0.02-seed0"))
    given = [*arguments, "study.engine=slurm", "study.slurm.gpus=0", "study.slurm.cpus=1"]
    killed = begin("study", given, **variables)
    runs.wait_for_step(gpt, 10)
    runs.wait_for_step(ngpt, 5)
    killed.kill()
    killed.wait()
    os.kill(int((fakes / "process-101").read_text()), signal.SIGUSR2)  # as --signal does where a job's time is over

    said, _ = begin("study", given, **variables).communicate(timeout=300)
    assert "2 of 2 runs in" in said
    assert len(list(fakes.glob("script-*"))) == 2
    assert [step > 0 for step in runs.began_at(gpt)] == [False, True]
    assert runs.began_at(ngpt) == [0]

    for run in (gpt, ngpt):
        assert runs.numbers(run) == runs.numbers(whole / "runs" / run.name)
