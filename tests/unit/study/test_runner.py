"""The loop that makes a study's runs starts, skips, shares and records them; the engine here runs nothing."""

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.config import ConfigError
from ngpt_train.core.errors import DataError
from ngpt_train.study.composition import Runs
from ngpt_train.study.definition import Study
from ngpt_train.study.engines import Ended, Job
from ngpt_train.study.points import DONE, FAILED, Point, result_of
from ngpt_train.study.tuning import next_points
from tests.unit.study.small_study import YAML, FakeEngine, fixed_points, good, leave, runner_of, study_of


def states(runner: Any) -> dict[str, str]:
    return {point.directory: result.state for point, result in runner.results.items()}


def started(runner: Any) -> list[str]:
    return [job.point.directory for job in runner.engine.started]


def test_every_run_is_made_once_and_then_never_again(tmp_path: Path) -> None:
    """Caught: a run that is left out, or made twice; a finished run that is started again."""
    study = study_of(tmp_path)
    first = runner_of(study, good(Runs(study)))
    assert first.complete()
    assert sorted(started(first)) == sorted(
        f"{arm}-{budget}-lr{lr}-seed{seed}"
        for arm, lr in (("gpt", 0.008), ("ngpt", 0.02))
        for budget in (5120, 25600)
        for seed in (0, 1)
    )
    assert [job.point.budget for job in first.engine.started] == [5120] * 4 + [25600] * 4  # to compare arms early
    assert set(states(first).values()) == {DONE}
    again = runner_of(study, good(Runs(study)))
    assert again.complete()
    assert not started(again)
    assert again.results == first.results


def test_what_ends_a_run_for_good_and_what_is_tried_again(tmp_path: Path) -> None:
    """Caught: a diverged run that is started again; a killed run that is not started again, or without end; a missing
    failure, or a missing reason."""
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0,1]")
    runs = Runs(study)

    def outcome(job: Job, attempt: int) -> Ended:
        name = f"{job.point.arm}{job.point.seed}"
        if name == "gpt0":
            reason = "NumericalError: the loss is nan"
            leave(job, runs, {"code": 4, "reason": reason, "step": 7})
            return Ended(job, 4, f"error: {reason}")
        if name == "gpt1":
            leave(job, runs, {"code": 1, "reason": "DeviceMemoryError: 81 GB are needed", "step": 0})
            return Ended(job, 1, "error: 81 GB are needed")
        if name == "ngpt0" or attempt < 3:
            leave(job, runs, None)
            return Ended(job, None, "killed by SIGKILL")
        return good(runs)(job, attempt)

    runner = runner_of(study, outcome)
    assert runner.complete()
    attempts = {name: started(runner).count(name) for name in started(runner)}
    assert attempts == {
        "gpt-5120-lr0.008-seed0": 1,
        "gpt-5120-lr0.008-seed1": 1,
        "ngpt-5120-lr0.02-seed0": 3,
        "ngpt-5120-lr0.02-seed1": 3,
    }
    reasons = {p.directory: r.reason for p, r in runner.results.items() if r.state == FAILED}
    assert reasons == {
        "gpt-5120-lr0.008-seed0": "diverged at step 7: the loss is nan",
        "gpt-5120-lr0.008-seed1": "out of memory: 81 GB are needed",
        "ngpt-5120-lr0.02-seed0": "killed by SIGKILL (3 attempts)",
    }
    record = json.loads((study.path / "failures" / "ngpt-5120-lr0.02-seed0.json").read_text())
    assert (record["arm"], record["budget"], record["seed"], record["values"]) == ("ngpt", 5120, 0, {"optim.lr": 0.02})

    # A new start tries only crashed runs again.
    again = runner_of(study, good(runs))
    assert again.complete()
    assert started(again) == ["ngpt-5120-lr0.02-seed0"]
    assert not list((study.path / "failures").iterdir())


def test_a_refused_run_ends_the_study_after_the_others_have_saved(tmp_path: Path) -> None:
    """Caught: a mistake in the configuration that is tried again, or that leaves other runs behind."""
    study = study_of(tmp_path)
    runs = Runs(study)

    def outcome(job: Job, attempt: int) -> Ended:
        return Ended(job, 2, "error: train.device=cuda: there is no GPU") if job.point.seed == 1 else good(runs)(job, 1)

    runner = runner_of(study, outcome)
    with pytest.raises(ConfigError, match=r"gpt-5120-lr0.008-seed1 was refused: train.device=cuda: there is no GPU"):
        runner.complete()
    assert isinstance(runner.engine, FakeEngine)
    assert runner.engine.stopped
    assert not runner.engine.running()
    assert len(started(runner)) <= 3


def test_data_that_no_run_can_read_end_the_study(tmp_path: Path) -> None:
    """Caught: a wrong path whose runs are all started again and again; a damaged checkpoint that ends the others."""
    study = study_of(tmp_path)
    runs = Runs(study)
    missing = "error: data.path=/data/x: no such file"
    runner = runner_of(study, lambda job, attempt: Ended(job, 3, missing))
    with pytest.raises(DataError, match=r"gpt-5120-lr0.008-seed0 cannot begin: data.path=/data/x: no such file"):
        runner.complete()
    assert len(started(runner)) <= 2

    def outcome(job: Job, attempt: int) -> Ended:
        if job.point.directory == "gpt-5120-lr0.008-seed0":
            leave(job, runs, None)
            return Ended(job, 3, "error: checkpoint step_00000005 is damaged")
        return good(runs)(job, attempt)

    assert runner_of(study, outcome).complete()


def test_a_stop_leaves_no_run_behind_and_starts_none(tmp_path: Path) -> None:
    """Caught: runs started after the request to stop; a stopped run recorded as a failure."""
    study = study_of(tmp_path)
    runs = Runs(study)
    asked = []

    def outcome(job: Job, attempt: int) -> Ended:
        asked.append(job)
        leave(job, runs, {"reason": "stopped by SIGTERM", "step": 3})
        return Ended(job, 0, "stopped by SIGTERM: saved")

    runner = runner_of(study, outcome, is_stopping=lambda: bool(asked))
    assert not runner.complete()
    assert len(started(runner)) == 2
    assert not runner.engine.running()
    assert not runner.results
    assert not (study.path / "failures").exists()


def test_runs_are_shared_with_the_other_studies_of_a_root(tmp_path: Path) -> None:
    """Caught: an equal run that is made again; a link to a run of another seed, or with other values of keys that a
    resume may change, such as the validation rows."""
    short = "study.budgets=[5120]"
    study = study_of(tmp_path, short)
    first = runner_of(study, good(Runs(study)))
    assert first.complete()

    unequal = ["checkpoint.every=5", "train.micro_rows=4", "study.seeds=[1,2]"]
    other = study_of(tmp_path, short, "study.name=other", *unequal)
    second = runner_of(other, good(Runs(other)))
    assert second.complete()
    assert {name.rpartition("-")[2] for name in started(second)} == {"seed2"}
    links = sorted(path.name for path in other.runs.iterdir() if path.is_symlink())
    assert links == sorted(name for name in states(first) if name.endswith("seed1"))
    shared = [point for point in second.results if point.seed == 1]
    assert all(second.results[point].loss == first.results[point].loss for point in shared)
    # They are found again without the other study's definition, and do without it once it is gone.
    study.path.rename(tmp_path / "gone")
    third = runner_of(other, good(Runs(other)))
    assert third.complete()
    assert sorted(started(third)) == links

    for change in ("eval.rows=32", "train.batch_rows=4", "optim.clip_norm=0.5"):
        different = study_of(tmp_path, short, "study.name=different", change)
        assert not [p for p in (different.runs).glob("*") if p.is_symlink()]
        runner = runner_of(different, good(Runs(different)))
        assert runner.complete()
        assert len(started(runner)) == 4, change
        different.path.rename(tmp_path / f"away-{change}")


def test_two_arms_that_are_the_same_have_one_run(tmp_path: Path) -> None:
    """Caught: two runs of one configuration; an arm that has no result because the other has the run."""
    text = YAML.replace("ngpt: {model: ngpt}", "again: {model: gpt, model.qk_norm: false}")
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0]", text=text)
    runner = runner_of(study, good(Runs(study)))
    assert isinstance(runner.engine, FakeEngine)
    runner.engine.jobs = 1
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
    job = Job(point, runs.directory(point), ())
    leave(job, runs, {}, config=replace(config, eval=replace(config.eval, rows=5)))
    runner = runner_of(study, good(runs))
    with pytest.raises(ConfigError, match=r"another run than the study's.*\n +eval.rows: 5 -> 64"):
        runner.complete()
    assert not started(runner)


def test_a_run_that_another_process_trains_is_awaited(tmp_path: Path) -> None:
    """Caught: a second process in a run's directory; a study that ends without the run, or that waits forever."""
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0]")
    runs = Runs(study)
    point = runs.first_point("gpt", 5120)
    run = runs.directory(point)
    leave(Job(point, run, ()), runs, None)
    holder = (run / "lock").open("a")
    fcntl.flock(holder, fcntl.LOCK_EX)

    def outcome(job: Job, attempt: int) -> Ended:
        assert job.point != point
        leave(Job(point, run, ()), runs, {}, 2.5)  # the other process ends its run
        holder.close()
        return good(runs)(job, attempt)

    runner = runner_of(study, outcome)
    assert runner.complete()
    assert runner.results[point].loss == 2.5
    assert [line for line in runner.watcher.lines if "waiting for it" in line]


def test_a_run_that_another_process_was_the_first_to_go_on_with(tmp_path: Path) -> None:
    """Two studies that share an unfinished run start it at the same moment. Caught: a study that ends because the
    process of one of them is refused; a run that nobody goes on with after the other study was stopped."""
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0]")
    runs = Runs(study)
    locks = []

    def outcome(job: Job, attempt: int) -> Ended:
        if job.point.arm == "gpt" and attempt == 1:
            leave(job, runs, None)
            locks.append((job.run / "lock").open("w"))
            fcntl.flock(locks[0], fcntl.LOCK_EX)
            return Ended(job, 2, f"error: process 1 on here is training in {job.run}.")
        for lock in locks:
            lock.close()  # the other process has stopped, and its run is not finished
        return good(runs)(job, attempt)

    runner = runner_of(study, outcome, retries=0)
    assert runner.complete()
    assert started(runner).count("gpt-5120-lr0.008-seed0") == 2
    assert set(states(runner).values()) == {DONE}


def test_a_run_directory_that_is_deleted_while_its_process_trains(tmp_path: Path) -> None:
    """The process writes its later checkpoints and its end there again. Caught: a run that is started in such a
    directory and is refused, without a word of what to do; one without a config that counts as ended."""
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0]")
    runs = Runs(study)

    def outcome(job: Job, attempt: int) -> Ended:
        if job.point.arm == "gpt":
            leave(job, runs, {})
            (job.run / "config.yaml").unlink()
            return Ended(job, 0, "")
        return good(runs)(job, attempt)

    said = r"gpt-5120-lr0.008-seed0 has lost its config.yaml.*Delete this directory, and the same command"
    for _ in range(2):
        with pytest.raises(DataError, match=said):
            runner_of(study, outcome).complete()
    shutil.rmtree(study.runs / "gpt-5120-lr0.008-seed0")
    again = runner_of(study, good(runs))
    assert again.complete()
    assert "gpt-5120-lr0.008-seed0" in started(again)


def test_a_finished_run_without_records(tmp_path: Path) -> None:
    """Caught: a traceback; a finished run that counts as failed."""
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0]")
    runs = Runs(study)
    assert runner_of(study, good(runs)).complete()
    run = study.runs / "gpt-5120-lr0.008-seed0"
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"gpt-5120-lr0.008-seed0/metrics.jsonl cannot be read.*delete the directory"):
        runner_of(study, good(runs)).complete()
    (run / "exit.json").write_text("[]")
    with pytest.raises(DataError, match=r"gpt-5120-lr0.008-seed0/exit.json: "):
        runner_of(study, good(runs)).complete()


def test_results_may_ask_for_more_points(tmp_path: Path) -> None:
    """Caught: a study that ends with the points that were wanted first; a result that is not shown to the tuning."""
    study = study_of(tmp_path, "study.budgets=[5120]", "study.seeds=[0,1,2]")

    def one_by_one(study: Study, starts: Any, results: Any) -> list[Point]:
        return fixed_points(study, starts, results)[:1]

    runner = runner_of(study, good(Runs(study)), next_points=one_by_one)
    assert runner.complete()
    assert [job.point.seed for job in runner.engine.started] == [0, 1, 2] * 2
    again = runner_of(study, good(Runs(study)), next_points=one_by_one)
    assert again.complete()
    assert len(again.results) == 6


def test_a_run_that_nobody_asks_for_any_more_has_a_say(tmp_path: Path) -> None:
    """Caught: a leftover run with the lowest loss, whose other seeds are not made although the comparison would take it
    as the best; a leftover run of another configuration that counts."""
    study = study_of(tmp_path, "study.budgets=[5120]", text=YAML.replace("  ngpt: {model: ngpt}\n", ""))
    runs = Runs(study)
    ours, foreign = (Point("gpt", 5120, (("optim.lr", lr),), 0) for lr in (0.064, 0.512))
    for point in (ours, foreign):
        leave(Job(point, runs.directory(point), ()), runs, {}, 1.0, runs.config(ours))

    runner = runner_of(study, good(runs), next_points=next_points)
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
    study = study_of(tmp_path)
    runs = Runs(study)
    point = Point("gpt", 5120, (("optim.lr", 0.004),), 0)
    run = runs.directory(point)
    assert result_of(point, run, 10, "loss").state == "waiting"
    leave(Job(point, run, ()), runs, end, loss)
    result = result_of(point, run, 10, "loss")
    assert (result.state, result.loss) == (state, 3.0 if state == "done" else None)
    if state == "done":
        assert result_of(point, run, 10, "bits_per_byte").loss == 1.0
