"""Studies that are killed, started at once, or run out of disk."""

import signal
from pathlib import Path

import pytest

from ngpt_train.config import load_config
from ngpt_train.config.arguments import arguments_of
from ngpt_train.study.definition import read_study
from ngpt_train.study.points import Runs
from tests.processes import fork_server, runs
from tests.processes.studies import SHARED, begin, paused, wait_for_no_trainer, wait_until

YAML = """\
arms:
  gpt: {model: gpt}
budgets: [5_120, 51_200]  # 10 and 100 steps
seeds: [0]
max_points: 1
"""
SHORT, LONG = "gpt-5120-lr0.008-seed0", "gpt-51200-lr0.008-seed0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="it looks for the processes in /proc"),
]


def of_text(tmp_path: Path, corpus: Path) -> list[str]:
    text = [f"data.path={corpus}", f"data.cache={tmp_path / 'cache'}"]
    return [*SHARED, *text, "study.jobs=1", "study.threads=1"]


def studied(tmp_path: Path, corpus: Path, root: Path, *more: str) -> list[str]:
    (tmp_path / "study").mkdir(exist_ok=True)
    (tmp_path / "study" / "small.yaml").write_text(YAML)
    return ["--config-dir", str(tmp_path), "study=small", f"study.root={root}", *of_text(tmp_path, corpus), *more]


def finish(verb: str, given: list[str]) -> None:
    finished = fork_server.run("ngpt_train", [verb, *given], timeout=900)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The long run of the small study, which nobody has stopped."""
    place = tmp_path_factory.mktemp("whole")
    given = studied(place, corpus, place)
    study = read_study(load_config(arguments_of("study", given[2:]), given[1]).study, given[2:], given[:2])
    of_study = Runs(study)
    finish("train", [*of_study.arguments(of_study.first_point("gpt", 51200)), *study.options])
    return study.runs / LONG


def test_a_disk_that_fills_up_during_a_study(tmp_path: Path, corpus: Path, disk: Path, whole: Path) -> None:
    """Caught: a study that ends with a traceback or in silence, that loses what has ended, or that is not completed by
    the same command when there is room."""
    given = studied(tmp_path, corpus, disk, "study.retries=0")
    root = disk / "small"
    process = begin("study", given)
    wait_until(process, lambda: runs.has_step(root / "runs" / LONG, 10))
    filling = runs.fill(disk)
    said, _ = process.communicate(timeout=600)
    assert process.returncode in (1, 3), said
    assert LONG in said
    assert "No space left on device" in said or "are missing" in said, said
    assert "Traceback" not in said
    assert runs.end_of(root / "runs" / SHORT)["reason"] == "done"
    ended = (root / "runs" / SHORT / "metrics.jsonl").read_bytes()

    filling.unlink()
    finish("study", given)
    assert (root / "runs" / SHORT / "metrics.jsonl").read_bytes() == ended
    assert not list((root / "failures").glob("*"))
    assert runs.numbers(root / "runs" / LONG) == runs.numbers(whole)
    assert runs.records(root / "runs" / LONG, "eval")[100]["loss"] == runs.records(whole, "eval")[100]["loss"]


def test_two_studies_that_share_a_run_are_killed_and_go_on_at_once(tmp_path: Path, corpus: Path, whole: Path) -> None:
    """Caught: a study that ends because the other one was the first to go on with the run; a run that both train."""
    root = tmp_path / "studies"
    given = [studied(tmp_path, corpus, root, "study.budgets=[51200]", f"study.name={name}") for name in ("a", "b")]
    run, link = (root / name / "runs" / LONG for name in ("a", "b"))
    first = begin("study", given[0])
    wait_until(first, lambda: runs.has_step(run, 10))
    with paused(root):  # or the run would be at its end before the second study shares it
        second = begin("study", given[1])
        wait_until(second, link.is_symlink)
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
            process.wait()
    wait_for_no_trainer(root)
    assert runs.began_at(run) == [0]

    both = [begin("study", x) for x in given]
    for process in both:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert "1 of 1 runs in" in said
    assert link.is_symlink()
    begun = runs.began_at(run)
    assert len(begun) == 2
    assert 10 <= begun[1] < 100
    assert runs.numbers(run) == runs.numbers(whole)
