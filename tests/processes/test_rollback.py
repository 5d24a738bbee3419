"""guards.rollback: back to the last good checkpoint, past the rows that did it, the same on every rank and restart."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import fork_server
from tests.processes.runs import arguments, end_of, numbers, records, train, write_corpus
from tests.processes.test_hostile_checkpoints import sign

STEPS, ROWS, SAVED, BAD = 26, 8, 15, 18  # the rows of step 18 are bad, the last checkpoint before is of step 15
OPTIONS = [f"train.steps={STEPS}", "checkpoint.every=5", "checkpoint.keep_last=9", "logging.every=4", "eval.rows=4"]
GUARDS = ["guards.rollback=true", "guards.spike_window=16", "guards.spike_height=5"]
SPOILED = [[ROWS * (BAD - 1), ROWS * BAD - 1, "nonsense"]]


def given(directory: Path, corpus: Path, *overrides: str) -> list[str]:
    return arguments(directory, corpus, *OPTIONS, *GUARDS, *overrides)


def spoiled(bad: Any, overrides: list[str], ranks: int = 1) -> subprocess.CompletedProcess[str]:
    command = ["bad_rows", json.dumps(bad), "train", *overrides]
    return fork_server.run("tests.processes.faulty", command, ranks if ranks > 1 else None)


def rollbacks(directory: Path) -> list[dict[str, Any]]:
    return json.loads((directory / "run.json").read_text()).get("rollbacks", [])


def without_rows(directory: Path, options: list[str], ranks: int) -> Path:
    """A run that nothing disturbs, whose checkpoint of step SAVED is given the position of step BAD."""
    every = ["checkpoint.every=1", "checkpoint.keep_last=20", f"train.stop_at={BAD}"]
    train(given(directory, directory, *options, *every), ranks)
    saved = directory / "runs/test/checkpoints"
    before, after = (json.loads((saved / f"step_{step:08d}/state.json").read_text()) for step in (SAVED, BAD))
    before["data"] = after["data"] | {"data_hash": before["data"]["data_hash"]}
    path = saved / f"step_{SAVED:08d}"
    (path / "state.json").write_text(json.dumps(before))
    sign(path, "state.json")
    for step in range(SAVED + 1, BAD + 1):
        shutil.rmtree(saved / f"step_{step:08d}")
    train(given(directory, directory, *options), ranks)
    return directory / "runs/test"


def source(kind: str, directory: Path) -> list[str]:
    """Overrides for text that is prepared, streamed, or a mixture of both."""
    text, other = (write_corpus(directory / f"{name}.jsonl", 300, seed) for seed, name in enumerate("ab"))
    if kind == "streamed":
        return [f"data.path={text}", "data.streaming=true", "data.streams=4", "data.workers=0"]
    if kind == "mixture":
        return ["data=mixture", "data.path=null", f"data.mixture=one 2 local {text}; two 1 local {other}"]
    return [f"data.path={text}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("prepared", 1),
        pytest.param("streamed", 2, marks=pytest.mark.slow),
        pytest.param("mixture", 2, marks=pytest.mark.slow),
        pytest.param("prepared fsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_past_the_rows_of_a_spike(kind: str, ranks: int, tmp_path: Path) -> None:
    """Bit for bit what a run does that never has these rows, whenever it is interrupted and whatever it logs. Caught:
    rows that are repeated or skipped too far, a state that is not the checkpoint's, a rollback nobody can see, one that
    another interval of the records moves."""
    data, _, parallel = kind.partition(" ")
    options = source(data, tmp_path) + ([f"parallel={parallel}"] if parallel else [])
    reference, run, cut = (tmp_path / name for name in ("reference", "run", "cut"))
    expected = without_rows(reference, options, ranks)
    ahead = ["data.workers=1"] if kind == "streamed" else []  # which has made rows that are passed over
    finished = spoiled(SPOILED, given(run, tmp_path, *options, *ahead), ranks)
    assert finished.returncode == 0, finished.stderr[-3000:]
    directory = run / "runs/test"
    assert numbers(directory) == numbers(expected)
    (rollback,) = rollbacks(directory)
    assert (rollback["step"], rollback["bad_step"]) == (SAVED, BAD)
    assert (rollback["first_row"], rollback["last_row"]) == (ROWS * SAVED, ROWS * BAD - 1)
    assert rollback["loss"] > 1.1 * rollback["median"] > 0
    (record,) = records(directory, "rollback").values()
    assert record["number"] == 1
    assert record["bad_step"] == BAD
    assert record["tokens"] > 0
    assert f"rollback 1: {rollback['why']}" in finished.stdout
    hashes = [records(path)[24]["data_hash"] for path in (directory, expected)]
    assert hashes[0] == hashes[1], "of the rows that the weights have seen"

    for stop_at, every in ((BAD - 1, 4), (21, 1)):
        stop = [f"train.stop_at={stop_at}", f"logging.every={every}"]
        assert spoiled(SPOILED, given(cut, tmp_path, *options, *stop), ranks).returncode == 0
    assert spoiled(SPOILED, given(cut, tmp_path, *options), ranks).returncode == 0
    after = numbers(cut / "runs/test")
    assert {step: after[step] for step in numbers(directory) if step in after} == {
        step: x for step, x in numbers(directory).items() if step in after
    }
    assert len(after) >= 5
    assert rollbacks(cut / "runs/test") == rollbacks(directory)
    assert len(records(cut / "runs/test", "rollback")) == 1


def test_ten_gradients_that_are_not_finite(tmp_path: Path, corpus: Path) -> None:
    """And a run that ends with code 4 without guards.rollback goes on with it, if that is allowed."""
    bad = [[ROWS * 16, ROWS * 26 - 1, "infinite"]]
    off = [override for override in given(tmp_path, corpus) if not override.startswith("guards.")]
    assert spoiled(bad, off).returncode == 4
    good = tmp_path / "runs/test/checkpoints/step_00000015"
    assert f"run.init_from={good} " in end_of(tmp_path / "runs/test")["reason"]
    refused = spoiled(bad, given(tmp_path, corpus))
    assert refused.returncode == 2
    assert "guards.rollback" in refused.stderr
    keys = ",".join(override.split("=")[0] for override in GUARDS)
    finished = spoiled(bad, given(tmp_path, corpus, f"run.allow_change=[{keys}]"))
    assert finished.returncode == 0, finished.stderr[-3000:]
    (rollback,) = rollbacks(tmp_path / "runs/test")
    assert (rollback["step"], rollback["bad_step"], rollback["loss"]) == (15, 26, rollback["loss"])
    assert "10 steps in a row, up to step 26," in rollback["why"]
    assert end_of(tmp_path / "runs/test")["code"] == 0


def test_a_bound(tmp_path: Path, corpus: Path) -> None:
    """Where everything that follows is bad, the run ends with code 4. Caught: a run that goes back for ever."""
    finished = spoiled([[ROWS * 17, 10**6, "nonsense"]], given(tmp_path, corpus, "guards.most_rollbacks=2"))
    assert finished.returncode == 4, finished.stderr[-3000:]
    assert "gone back to step 15 2 times already" in finished.stderr
    found = rollbacks(tmp_path / "runs/test")
    assert [rollback["number"] for rollback in found] == [1, 2]
    assert [rollback["first_row"] for rollback in found] == [ROWS * 15] * 2
    assert found[1]["last_row"] > found[0]["last_row"]
    assert end_of(tmp_path / "runs/test")["code"] == 4


def test_nowhere_to_go_back_to(tmp_path: Path, corpus: Path) -> None:
    """A spike before the first checkpoint is said, and the run goes on."""
    finished = spoiled(SPOILED, given(tmp_path, corpus, "checkpoint.every=25"))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "there is no good checkpoint to go back to" in finished.stdout
    assert rollbacks(tmp_path / "runs/test") == []


@pytest.mark.slow
def test_a_resume_around_a_rollback(tmp_path: Path, corpus: Path) -> None:
    """Equals the undisturbed run, with guards on and the rollback before, at or after the resume."""
    shared = tmp_path / "whole"
    assert spoiled(SPOILED, given(shared, corpus, "logging.every=1")).returncode == 0
    expected = numbers(shared / "runs/test")
    for stop_at in (6, *range(SAVED, BAD + 3), STEPS - 1):
        directory = tmp_path / str(stop_at)
        for stop in ([f"train.stop_at={stop_at}"], []):
            assert spoiled(SPOILED, given(directory, corpus, "logging.every=1", *stop)).returncode == 0
        assert numbers(directory / "runs/test") == expected, stop_at
        assert rollbacks(directory / "runs/test") == rollbacks(shared / "runs/test"), stop_at
