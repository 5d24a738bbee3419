"""What the loop tells and saves, step by step, with a real model and made-up batches."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.data.loader import Position
from ngpt_train.observe.train_records import TrainRecords
from ngpt_train.training import StepResult, build_state, loop, train_step
from ngpt_train.training.checkpoint import Checkpoints, load_state
from ngpt_train.training.hooks import Hook, TrainingRun, due
from ngpt_train.training.hooks.bad_steps import SkippedSteps
from ngpt_train.training.hooks.stopping import StopRequest
from ngpt_train.training.loop import train
from ngpt_train.training.state import Interval, TrainState
from tests.properties.architectures import SMALL
from tests.properties.runs import infinite_loss, run_config, text_like_rows
from tests.reference.training import Recipe
from tests.stored import save_state

ROWS, T = 4, 16
RECIPE = Recipe(20, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=0)
BAD_STEP = 3  # from 0
EPOCH_ROWS = 10.0


def loop_config(steps: int, *options: str) -> Config:
    given = run_config(
        "gpt",
        SMALL,
        RECIPE,
        rows=ROWS,
        context=T,
        micro_rows=ROWS,
        parallel="single",
        options=["checkpoint.async=false", *options],
    )
    return replace(given, train=replace(given.train, stop_at=steps))


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    """Rows of a step, ever fewer of whose targets count."""
    tokens, targets = text_like_rows(ROWS, T, SMALL.vocab_size, seed=step)
    targets[:, : step % 8] = -100
    return [(tokens, targets)]


def batches(first: int) -> Iterator[tuple[list[tuple[Tensor, Tensor]], Position]]:
    step = first
    while True:
        step += 1
        yield batch(step - 1), Position(rows=ROWS * step, data_hash=0, cursors={}, skipped={}, rows_by_source={})


class Records(list[dict[str, Any]]):
    def log(self, record: dict[str, Any]) -> None:
        self.append(record)

    def message(self, text: str) -> None:
        pass


class NoMeter:
    def step(self, seconds: float, data_seconds: float, tokens: int) -> None: ...
    def read(self) -> dict[str, Any]:
        return {}


@dataclass
class Beside(Hook):
    """What a test does at the moments of saves and evaluations."""

    save_with: Callable[[TrainState], object] | None
    evaluate_with: Callable[[TrainState], object]

    def after_step(self, run: TrainingRun) -> None:
        run.saving = self.waits(run)

    def waits(self, run: TrainingRun) -> bool:
        asked = run.state.config
        return due(run.step, asked.checkpoint.every) or due(run.step, asked.eval.every)

    def save(self, run: TrainingRun) -> None:
        if self.save_with is not None and (run.ends or due(run.step, run.state.config.checkpoint.every)):
            self.save_with(run.state)

    def start(self, run: TrainingRun) -> None:
        self.evaluate(run)

    def evaluate(self, run: TrainingRun) -> None:
        if run.ends or due(run.step, run.state.config.eval.every):
            self.evaluate_with(run.state)
            run.log(run.record("eval"))


def run(
    state: TrainState,
    save: Callable[[TrainState], object] | None = None,
    evaluate: Callable[[TrainState], object] = lambda state: None,
) -> Records:
    records = Records()
    hooks = [TrainRecords(NoMeter(), {"": EPOCH_ROWS}), Beside(save, evaluate), SkippedSteps(lambda: "")]
    train(TrainingRun(state, batches(state.step), StopRequest(None), hooks, [records]))
    return records


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[StepResult]:
    """Of every step that the loop takes; the gradient of BAD_STEP is not finite."""
    seen: list[StepResult] = []

    def poisoned(state: TrainState, micro_batches: Any, **options: Any) -> StepResult:
        with infinite_loss(state, math.nan) if state.step == BAD_STEP else nullcontext():
            seen.append(train_step(state, micro_batches, **options))
        return seen[-1]

    monkeypatch.setattr(loop, "train_step", poisoned)
    return seen


def loss_means(records: Records) -> dict[int, float]:
    return {record["step"]: record["loss_mean"] for record in records if record["kind"] == "train"}


def test_loss_mean_is_over_the_targets_of_the_interval(results: list[StepResult]) -> None:
    """Caught: a mean of the steps' means, a skipped step that makes it NaN or counts, an interval that does not begin
    anew, one that ends with the run."""
    records = run(build_state(loop_config(8, "logging.every=3")))
    assert [bool(result.skipped) for result in results] == [step == BAD_STEP for step in range(8)]
    expected = {}
    for last in (3, 6):
        good = [result for result in results[last - 3 : last] if not result.skipped]
        sums, counts = [float(r.loss) * int(r.n_tokens) for r in good], [int(r.n_tokens) for r in good]
        assert len(set(counts)) == len(counts), "weights would not show"
        expected[last] = sum(sums) / sum(counts)
    assert loss_means(records) == pytest.approx(expected, rel=1e-14)
    assert {record["step"]: record["skipped"] for record in records if record["kind"] == "train"} == {3: 0, 6: 1}


def test_loss_mean_of_one_step_is_its_loss(results: list[StepResult]) -> None:
    records = run(build_state(loop_config(5, "logging.every=1")))
    means = loss_means(records)
    assert math.isnan(means.pop(BAD_STEP + 1))
    assert means == {step: float(results[step - 1].loss) for step in means}


def test_loss_mean_after_a_resume_is_that_of_a_run_that_went_on(results: list[StepResult], tmp_path: Path) -> None:
    """Caught: an interval that begins with the process."""
    whole = loss_means(run(build_state(loop_config(8, "logging.every=3"))))
    first = build_state(loop_config(5, "logging.every=3"))
    kept = Checkpoints(tmp_path, first.world, keep_last=1, keep_every=None)
    parts = loss_means(run(first, save=lambda state: save_state(kept, state)))
    again = build_state(loop_config(8, "logging.every=3"))
    load_state(tmp_path / "step_00000005", again)
    assert parts | loss_means(run(again)) == whole
    assert set(whole) == {3, 6}


class Clock:
    """A second passes with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now


SECONDS = 2  # of a step: from before the data to after them, and from there to the end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(loop, "time", found)
    return found


def spent_by_step(records: Records) -> dict[int, tuple[float, float, float]]:
    return {r["step"]: (r["train_seconds"], r["flops"], r["epochs"]) for r in records if r["kind"] == "train"}


def test_what_a_run_has_spent_goes_on_after_a_resume(results: list[StepResult], clock: Clock, tmp_path: Path) -> None:
    """Caught: seconds of validations and checkpoints, seconds that begin with the process, steps of between records
    that do not count; FLOPs of targets that count, and without those of a skipped step; epochs of steps."""

    def slow(state: TrainState) -> None:
        clock.now += 1000

    first = build_state(loop_config(5, "logging.every=3", "eval.every=1", "checkpoint.every=2"))
    kept = Checkpoints(tmp_path, first.world, keep_last=1, keep_every=None)

    def save(state: TrainState) -> None:
        clock.now += 1000
        save_state(kept, state)

    records = run(first, save=save, evaluate=slow)
    again = build_state(loop_config(8, "logging.every=3", "eval.every=1"))
    load_state(tmp_path / "step_00000005", again)
    records += run(again, evaluate=slow)
    flops = ROWS * T * first.model.flops_per_token(T)
    assert spent_by_step(records) == {n: (SECONDS * n, flops * n, ROWS * n / EPOCH_ROWS) for n in (3, 6)}
    evals = [record for record in records if record["kind"] == "eval"]
    assert {(r["step"], r["train_seconds"], r["flops"]) for r in evals} == {
        (n, SECONDS * n, flops * n) for n in range(9)
    }


def test_an_interval_counts_clipped_steps() -> None:
    """Caught: an infinite norm, whose step is skipped, taken for a clipped one; a resume that forgets clipped steps."""

    def result(norm: float) -> StepResult:
        one = torch.ones((), dtype=torch.float64)
        return StepResult(one, norm * one, one.long(), ~torch.isfinite(norm * one), 0.1, None, one)

    interval = Interval(torch.device("cpu"), clip_norm=1.0)
    for norm in (2.0, 1.0, math.inf, math.nan, 1.5):
        interval.add(result(norm))
    assert (interval.read()["clipped"], interval.read()["skipped"]) == (2 / 5, 2)
    resumed = Interval(torch.device("cpu"), clip_norm=1.0)
    resumed.load_state_dict(json.loads(json.dumps(interval.state_dict())))
    assert resumed.read()["clipped"] == 2 / 5
    resumed.add(result(3.0))
    assert resumed.read()["clipped"] == 3 / 6
    resumed.reset()
    assert resumed.read()["clipped"] is None, "no steps, no share"


MOMENTS = ("start", "before_step", "after_step", "check", "save", "evaluate", "finish")


def test_hooks_are_called_at_their_moments() -> None:
    """Caught: a save after the evaluation, a check after it, hooks in another order, an end that does not save."""
    seen: list[tuple[str, int, int]] = []

    def hook(number: int) -> Hook:
        found = Hook()
        for moment in MOMENTS:
            setattr(found, moment, lambda run, moment=moment: seen.append((moment, run.step, number)))
        return found

    class Ends(Hook):
        def after_step(self, run: TrainingRun) -> None:
            run.reason = "enough" if run.step == 2 else None

    found = TrainingRun(build_state(loop_config(9)), batches(0), StopRequest(None), [hook(0), Ends(), hook(1)])
    assert train(found) == "enough"
    expected = [("start", 0), ("before_step", 0), ("after_step", 1), ("check", 1), ("evaluate", 1)]
    expected += [("before_step", 1), ("after_step", 2), ("check", 2), ("save", 2)]
    assert seen == [(*at, number) for at in expected for number in (0, 1)] + [("finish", 2, 1), ("finish", 2, 0)]
