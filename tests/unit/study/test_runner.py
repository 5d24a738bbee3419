"""The loop that makes a study's runs starts, skips, shares and records them; the engine here runs nothing."""

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.config import ConfigError
from ngpt_train.core.errors import DataError
from ngpt_train.study import runner as study_runner
from ngpt_train.study.definition import Study
from ngpt_train.study.points import DONE, FAILED, Point, Result, Runs
from ngpt_train.study.search import Grids, Starts, next_points
from tests.unit.study.small_study import YAML, FakeEngine, Heard, Outcome, good, leave, study_of

SHORT, ONE_SEED = "study.budgets=[5120]", "study.seeds=[0]"
GPT = "gpt-5120-lr0.008-seed0"


def fixed_points(study: Study, starts: Starts, grids: Grids, results: Mapping[Point, Result]) -> list[Point]:
    """One learning rate for each arm, budget and seed, without tuning."""
    each = product(study.arms, study.budgets, study.seeds)
    points = [Point(arm, budget, (("optim.lr", starts(arm, budget)),), seed) for arm, budget, seed in each]
    return [point for point in points if point not in results]


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_runner, "next_points", fixed_points)


def runner_of(study: Study, outcome: Outcome = good, retries: int = 2, jobs: int = 2, **more: Any) -> Any:
    runs = Runs(study)
    return study_runner.Runner(study, runs, FakeEngine(runs, outcome, jobs), Heard(), retries, **more)  # type: ignore[arg-type]


def states(runner: Any) -> dict[str, str]:
    return {point.directory: result.state for point, result in runner.results.items()}


def started(runner: Any) -> list[str]:
    return [point.directory for point in runner.engine.started]


def test_every_run_is_made_once_and_then_never_again(tmp_path: Path) -> None:
    """Caught: a run that is left out, or made twice; a finished run that is started again."""
    first = runner_of(study_of(tmp_path))
    assert first.complete()
    assert sorted(started(first)) == sorted(
        f"{arm}-{budget}-lr{lr}-seed{seed}"
        for arm, lr in (("gpt", 0.008), ("ngpt", 0.02))
        for budget in (5120, 25600)
        for seed in (0, 1)
    )
    assert [point.budget for point in first.engine.started] == [5120] * 4 + [25600] * 4  # to compare arms early
    assert set(states(first).values()) == {DONE}
    again = runner_of(study_of(tmp_path))
    assert again.complete()
    assert not started(again)
    assert again.results == first.results


def test_what_ends_a_run_for_good_and_what_is_tried_again(tmp_path: Path) -> None:
    """Caught: a diverged run that is started again; a killed run that is not started again, or without end; a missing
    failure, or a missing reason."""
    study = study_of(tmp_path, SHORT)

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        name = f"{point.arm}{point.seed}"
        if name == "gpt0":
            reason = "NumericalError: the loss is nan"
            leave(runs, point, {"code": 4, "reason": reason, "step": 7})
            return 4, f"error: {reason}"
        if name == "gpt1":
            leave(runs, point, {"code": 1, "reason": "DeviceMemoryError: 81 GB are needed", "step": 0})
            return 1, "error: 81 GB are needed"
        if name == "ngpt0" or attempt < 3:
            leave(runs, point, None)
            return None, "killed by SIGKILL"
        return good(runs, point, attempt)

    runner = runner_of(study, outcome)
    assert runner.complete()
    attempts = {name: started(runner).count(name) for name in started(runner)}
    killed = "ngpt-5120-lr0.02-seed0"
    assert attempts == {GPT: 1, "gpt-5120-lr0.008-seed1": 1, killed: 3, "ngpt-5120-lr0.02-seed1": 3}
    reasons = {p.directory: r.reason for p, r in runner.results.items() if r.state == FAILED}
    assert reasons == {
        GPT: "diverged at step 7: the loss is nan",
        "gpt-5120-lr0.008-seed1": "out of memory: 81 GB are needed",
        killed: "killed by SIGKILL (3 attempts)",
    }
    record = json.loads((study.path / "failures" / f"{killed}.json").read_text())
    assert (record["arm"], record["budget"], record["seed"], record["values"]) == ("ngpt", 5120, 0, {"optim.lr": 0.02})

    # A new start tries only crashed runs again.
    again = runner_of(study)
    assert again.complete()
    assert started(again) == [killed]
    assert not list((study.path / "failures").iterdir())


def test_a_refused_run_ends_the_study_after_the_others_have_saved(tmp_path: Path) -> None:
    """Caught: a mistake in the configuration that is tried again, or that leaves other runs behind."""

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        return (2, "error: train.device=cuda: there is no GPU") if point.seed == 1 else good(runs, point, 1)

    runner = runner_of(study_of(tmp_path), outcome)
    with pytest.raises(ConfigError, match=r"gpt-5120-lr0.008-seed1 was refused: train.device=cuda"):
        runner.complete()
    assert runner.engine.stopped
    assert not runner.engine.running()
    assert len(started(runner)) <= 3


def test_data_that_no_run_can_read_end_the_study(tmp_path: Path) -> None:
    """Caught: a wrong path whose runs are all started again and again; a damaged checkpoint that ends the others."""
    study = study_of(tmp_path)
    runner = runner_of(study, lambda *_: (3, "error: data.path=/data/x: no such file"))
    with pytest.raises(DataError, match=rf"{GPT} cannot begin: data.path=/data/x"):
        runner.complete()
    assert len(started(runner)) <= 2

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        if point.directory != GPT:
            return good(runs, point, attempt)
        leave(runs, point, None)
        return 3, "error: checkpoint step_00000005 is damaged"

    assert runner_of(study, outcome).complete()


def test_a_stop_leaves_no_run_behind_and_starts_none(tmp_path: Path) -> None:
    """Caught: runs started after the request to stop; a stopped run recorded as a failure."""
    study, asked = study_of(tmp_path), []

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        asked.append(point)
        leave(runs, point, {"reason": "stopped by SIGTERM", "step": 3})
        return 0, "stopped by SIGTERM: saved"

    runner = runner_of(study, outcome, is_stopping=lambda: bool(asked))
    assert not runner.complete()
    assert len(started(runner)) == 2
    assert not runner.engine.running()
    assert not runner.results
    assert not (study.path / "failures").exists()


def test_runs_are_shared_with_the_other_studies_of_a_root(tmp_path: Path) -> None:
    """Caught: an equal run that is made again; a link to a run of another seed, or with other values of keys that a
    resume may change, such as the validation rows."""
    study = study_of(tmp_path, SHORT)
    first = runner_of(study)
    assert first.complete()

    unequal = ["checkpoint.every=5", "train.micro_rows=4", "study.seeds=[1,2]"]
    other = study_of(tmp_path, SHORT, "study.name=other", *unequal)
    second = runner_of(other)
    assert second.complete()
    assert {name.rpartition("-")[2] for name in started(second)} == {"seed2"}
    links = sorted(path.name for path in other.runs.iterdir() if path.is_symlink())
    assert links == sorted(name for name in states(first) if name.endswith("seed1"))
    shared = [point for point in second.results if point.seed == 1]
    assert all(second.results[point].loss == first.results[point].loss for point in shared)
    # They are found again without the other study's definition, and do without it once it is gone.
    study.path.rename(tmp_path / "gone")
    third = runner_of(other)
    assert third.complete()
    assert sorted(started(third)) == links

    for change in ("eval.rows=32", "train.batch_rows=4"):
        different = study_of(tmp_path, SHORT, "study.name=different", change)
        runner = runner_of(different)
        assert runner.complete()
        assert len(started(runner)) == 4, change
        different.path.rename(tmp_path / f"away-{change}")


def test_two_arms_that_are_the_same_have_one_run(tmp_path: Path) -> None:
    """Caught: two runs of one configuration; an arm that has no result because the other has the run."""
    text = YAML.replace("ngpt: {model: ngpt}", "again: {model: gpt, model.qk_norm: false}")
    runner = runner_of(study_of(tmp_path, SHORT, ONE_SEED, text=text), jobs=1)
    assert runner.complete()
    assert len(started(runner)) == 1
    assert len({result.loss for result in runner.results.values()}) == 1
    assert len(runner.results) == 2


def test_a_run_of_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    """Caught: a directory whose run was made with other keys and counts as the study's."""
    study = study_of(tmp_path)
    runs = Runs(study)
    point = runs.first_point("gpt", 5120)
    config = runs.config(point)
    leave(runs, point, {}, config=replace(config, eval=replace(config.eval, rows=5)))
    runner = runner_of(study)
    with pytest.raises(ConfigError, match=r"another run than the study's.*\n +eval.rows: 5 -> 64"):
        runner.complete()
    assert not started(runner)


def test_a_run_that_another_process_trains_is_awaited(tmp_path: Path) -> None:
    """Caught: a second process in a run's directory; a study that ends without the run, or that waits forever."""
    study = study_of(tmp_path, SHORT, ONE_SEED)
    ours = Runs(study).first_point("gpt", 5120)
    leave(Runs(study), ours, None)
    holder = (study.runs / GPT / "lock").open("a")
    fcntl.flock(holder, fcntl.LOCK_EX)

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        assert point != ours
        leave(runs, ours, {}, 2.5)  # the other process ends its run
        holder.close()
        return good(runs, point, attempt)

    runner = runner_of(study, outcome)
    assert runner.complete()
    assert runner.results[ours].loss == 2.5
    assert [line for line in runner.progress if "waiting for it" in line]


def test_a_run_that_another_process_was_the_first_to_go_on_with(tmp_path: Path) -> None:
    """Two studies that share an unfinished run start it at the same moment. Caught: a study that ends because the
    process of one of them is refused; a run that nobody goes on with after the other study was stopped."""
    locks = []

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        if point.arm == "gpt" and attempt == 1:
            leave(runs, point, None)
            locks.append((runs.directory(point) / "lock").open("w"))
            fcntl.flock(locks[0], fcntl.LOCK_EX)
            return 2, "error: process 1 on here is training in it."
        for lock in locks:
            lock.close()  # the other process has stopped, and its run is not finished
        return good(runs, point, attempt)

    runner = runner_of(study_of(tmp_path, SHORT, ONE_SEED), outcome, retries=0)
    assert runner.complete()
    assert started(runner).count(GPT) == 2
    assert set(states(runner).values()) == {DONE}


def test_a_run_directory_that_is_deleted_while_its_process_trains(tmp_path: Path) -> None:
    """The process writes its later checkpoints and its end there again. Caught: a run that is started in such a
    directory and is refused, without a word of what to do; one without a config that counts as ended."""
    study = study_of(tmp_path, SHORT, ONE_SEED)

    def outcome(runs: Runs, point: Point, attempt: int) -> tuple[int | None, str]:
        good(runs, point, attempt)
        if point.arm == "gpt":
            (runs.directory(point) / "config.yaml").unlink()
        return 0, ""

    for _ in range(2):
        with pytest.raises(DataError, match=rf"{GPT} has lost its config.yaml.*Delete this directory"):
            runner_of(study, outcome).complete()
    shutil.rmtree(study.runs / GPT)
    again = runner_of(study)
    assert again.complete()
    assert GPT in started(again)


def test_a_finished_run_without_records(tmp_path: Path) -> None:
    """Caught: a traceback; a finished run that counts as failed."""
    study = study_of(tmp_path, SHORT, ONE_SEED)
    assert runner_of(study).complete()
    (study.runs / GPT / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=rf"{GPT}/metrics.jsonl cannot be read.*delete the directory"):
        runner_of(study).complete()


def test_a_run_that_nobody_asks_for_any_more_has_a_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a leftover run with the lowest loss, whose other seeds are not made although the comparison would take it
    as the best; a leftover run of another configuration that counts; a study that ends with the points that were wanted
    first."""
    monkeypatch.setattr(study_runner, "next_points", next_points)
    study = study_of(tmp_path, SHORT, text=YAML.replace("  ngpt: {model: ngpt}\n", ""))
    runs = Runs(study)
    ours, foreign = (Point("gpt", 5120, (("optim.lr", lr),), 0) for lr in (0.064, 0.512))
    for point in (ours, foreign):
        leave(runs, point, {}, 1.0, runs.config(ours))

    runner = runner_of(study)
    assert runner.complete()
    assert {p.seed for p in runner.results if p.values == ours.values} == {0, 1}
    assert foreign not in runner.results


@pytest.mark.parametrize(
    ("end", "loss", "state"),
    [
        ({}, 3.0, "done"),
        ({}, float("nan"), "failed"),
        ({"step": 5}, 3.0, "unfinished"),
        ({"reason": "stopped by SIGTERM"}, 3.0, "unfinished"),
        ({"code": 1, "reason": "OSError: disk"}, 3.0, "unfinished"),
        ({"code": 4, "reason": "NumericalError: spikes"}, 3.0, "failed"),
        (None, 3.0, "unfinished"),
    ],
)
def test_what_has_become_of_a_run(tmp_path: Path, end: Any, loss: float, state: str) -> None:
    """Caught: a run that stopped before its end, or whose loss is no number, as done; its loss in another metric."""
    runs = Runs(study_of(tmp_path))
    point = Point("gpt", 5120, (("optim.lr", 0.004),), 0)
    assert runs.result(point).state == "waiting"
    leave(runs, point, end, loss)
    result = runs.result(point)
    assert (result.state, result.loss) == (state, 3.0 if state == "done" else None)
    if state == "done":
        assert Runs(replace(runs.study, metric="bits_per_byte")).result(point).loss == 1.0
