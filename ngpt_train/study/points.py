"""The points of a study. Each is a run; its result is read from the run's directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.core.recorded import TEXT, Record, checked, read_end, read_records
from ngpt_train.study.definition import Study, Value, text_of

DONE, FAILED, UNFINISHED, WAITING = "done", "failed", "unfinished", "waiting"
FAILURES = "failures"  # directory of a study with FAILURES/<run>.json for each run that crashed too often
ENDED = "done"  # the reason in exit.json after the planned end
DIVERGED = 4  # exit code
_OUT_OF_MEMORY = "DeviceMemoryError"
_LONGEST = 180  # characters of a directory's name; a run's name may have 200


@dataclass(frozen=True)
class Point:
    """A run of a study. values: (tuned key, value) by key."""

    arm: str
    budget: int  # tokens
    values: tuple[tuple[str, Value], ...]
    seed: int

    @property
    def directory(self) -> str:
        """The name of its run directory: `ngpt-819200-lr0.02-seed0`."""
        values = [f"{key.removeprefix('optim.')}{text_of(value)}" for key, value in self.values]
        name = "-".join([self.arm, str(self.budget), *values, f"seed{self.seed}"])
        if len(name) > _LONGEST:
            name = f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        return name


@dataclass(frozen=True)
class Result:
    """The result of a point.

    state: DONE; FAILED for `reason`, without a loss; UNFINISHED, if it has begun; WAITING. loss: of the validation at
    the end, in the study's metric.
    """

    point: Point
    state: str
    loss: float | None
    reason: str
    run: Path

    @property
    def is_final(self) -> bool:
        return self.state in (DONE, FAILED)


# The signature of `tuning.next_points`.
NextPoints = Callable[[Study, Callable[[str, int], float], Mapping[Point, Result]], list[Point]]


def result_of(point: Point, run: Path, steps: int, metric: str) -> Result:
    """The result of a point with `steps` steps, from its run directory `run` or the record of its crashes. Raises
    DataError for a damaged file."""
    if not (run / "config.yaml").is_file():
        state = WAITING
    else:
        end = read_end(run)
        if end is not None and (failure := _failure(end)):
            return Result(point, FAILED, None, failure, run)
        if end is not None and end["reason"] == ENDED and end["step"] == steps:
            loss = _end_loss(run, steps, metric)
            if loss is not None:
                return Result(point, DONE, loss, "", run)
            return Result(point, FAILED, None, f"its validation loss at step {steps} is {loss}", run)
        state = UNFINISHED
    record = failure_record(run)
    if record.exists():
        return Result(point, FAILED, None, reason_of(record), run)
    return Result(point, state, None, "", run)


def failure_record(run: Path) -> Path:
    """The file for a run that crashed too often. It lies outside of the run's directory, which only the run changes."""
    return run.parent.parent / FAILURES / f"{run.name}.json"


def reason_of(record: Path) -> str:
    """The reason in the record of a run's crashes. Raises DataError."""
    return str(checked(read_json(record), {"reason": TEXT}, str(record)).get("reason") or "it crashed")


def _failure(end: Record) -> str | None:
    """The reason of a permanent failure; None if the run may be resumed."""
    reason = end["reason"]
    if end["code"] == DIVERGED:
        return f"diverged at step {end['step']}: {reason.partition(': ')[2] or reason}"
    if reason.startswith(_OUT_OF_MEMORY):
        return f"out of memory: {reason.partition(': ')[2]}"
    return None


def _end_loss(run: Path, steps: int, metric: str) -> float | None:
    """The metric of the validation after the last step; None without one. Raises DataError."""
    try:
        records, _ = read_records(run / "metrics.jsonl", ["eval"])
    except DataError as error:
        raise DataError(f"{error} Or delete the directory of this run to have it made again.") from None
    return next((record.get(metric) for record in records["eval"] if record["step"] == steps), None)
