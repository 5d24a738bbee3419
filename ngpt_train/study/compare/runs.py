"""Runs as `compare` reads them: from config.yaml, run.json, metrics.jsonl and evals/ of their directories."""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.keys import TABLES
from ngpt_train.config.validate import flatten
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import json_lines, read_json, read_yaml_text
from ngpt_train.study.definition import SAME_BUDGET


@dataclass(frozen=True)
class Rows:
    """The loss of each fixed validation row after a step."""

    loss_sum: np.ndarray  # (R,) fp64, nats
    n_targets: np.ndarray  # (R,) int64
    rows_hash: str  # which rows they are


@dataclass(frozen=True)
class Run:
    """One run directory. A run of which nothing is known yet has empty records."""

    path: Path
    config: Mapping[str, Any]  # dotted key -> value, as config.yaml has it; keys of older versions may be missing
    facts: Mapping[str, Any]  # the newest start in run.json: git_commit, versions, device, world_size, n_params, ...
    train: list[dict[str, Any]]  # the records of metrics.jsonl by step, of kind train
    evals: list[dict[str, Any]]  # and of kind eval
    end: Mapping[str, Any] | None  # exit.json: code, reason, step; None where the run has not ended by itself
    damaged: int = 0  # lines of metrics.jsonl that are no records, such as one that a kill has cut

    @property
    def seed(self) -> int:
        return int(self.config.get("run.seed", 0))

    @property
    def steps(self) -> int:
        """Steps of the schedule, at whose end the learning rate is annealed."""
        return int(self.config["train.steps"])

    @property
    def is_annealed(self) -> bool:
        """Whether the run has reached the end of its schedule, and was validated there."""
        return bool(self.evals) and self.evals[-1]["step"] == self.steps

    @cached_property
    def rows(self) -> Rows | None:
        """Those of the last validation; None where its file is missing. Raises DataError where it is damaged."""
        return self.rows_at(self.evals[-1]["step"]) if self.evals else None

    def rows_at(self, step: int) -> Rows | None:
        path = self.path / "evals" / f"step_{step:08d}.npz"
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                rows = Rows(
                    file["loss_sum"].astype(np.float64), file["n_targets"].astype(np.int64), str(file["rows_hash"])
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            # numpy's ValueError tells how to load what may execute.
            why = "it holds no arrays" if isinstance(error, ValueError) else str(error)
            raise DataError(
                f"{path} is damaged: {why}. Leave this run out, or evaluate its checkpoint again."
            ) from None
        if rows.loss_sum.ndim != 1 or rows.loss_sum.shape != rows.n_targets.shape:
            raise DataError(f"{path} is damaged: loss_sum and n_targets are not of the same rows")
        return rows


def read_run(path: Path) -> Run:
    """The run in the directory `path`. Raises DataError where it is none, or where a file of it cannot be read."""
    import yaml

    if not (path / "config.yaml").is_file():
        raise DataError(f"{path} is not a run directory: it has no config.yaml. Name directories such as runs/NAME.")
    try:
        tree = yaml.safe_load(read_yaml_text(path / "config.yaml"))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise DataError(f"{path / 'config.yaml'}: not a readable config: {' '.join(str(error).split())}") from None
    config = dict(flatten(tree, TABLES)) if isinstance(tree, dict) else {}
    for key, least in (("train.steps", 1), ("run.seed", 0)):
        value = config.get(key, None if key == "train.steps" else 0)
        if type(value) is not int or value < least:
            problem = "it has no train.steps" if value is None else f"{key} is {value!r}, and no whole number"
            raise DataError(f"{path / 'config.yaml'}: not the config of a run: {problem}")
    if config.get("schedule.final_share") is not None:
        config.pop("schedule.final_lr", None)  # it follows optim.lr
    lines: list[Any] = []
    if (path / "metrics.jsonl").exists():
        try:
            lines = [record for _, record in json_lines(path / "metrics.jsonl")]
        except OSError as error:
            why = f"{path / 'metrics.jsonl'} cannot be read: {error.strerror}. Mend it, or leave this run out."
            raise DataError(why) from None
    records = [record for record in lines if record is not None]
    facts = read_json(path / "run.json") if (path / "run.json").exists() else {"starts": []}
    starts = facts.get("starts") if isinstance(facts, dict) else None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise DataError(f"{path / 'run.json'} is damaged: it does not list the starts of a run")
    return Run(
        path=path,
        config=config,
        facts=starts[-1] if starts else {},
        train=_of_kind(records, "train"),
        evals=_of_kind(records, "eval"),
        end=read_json(path / "exit.json") if (path / "exit.json").exists() else None,
        damaged=len(lines) - len(records),
    )


def _of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """By step; of two records of a step, which a run that was killed may leave, the later."""
    by_step = {r["step"]: r for r in records if r.get("kind") == kind and type(r.get("step")) is int}
    return [by_step[step] for step in sorted(by_step)]


def budget_of(run: Run) -> float:
    """Tokens of the run's schedule: steps times tokens per step as the config has them, unless it does not say it, or
    the records count something else."""
    config, counted = run.config, _counted(run)
    per_step = config.get("train.batch_tokens")
    if isinstance(config.get("train.batch_rows"), int) and isinstance(config.get("model.context"), int):
        per_step = config["train.batch_rows"] * config["model.context"]
    planned = run.steps * per_step if isinstance(per_step, int) else None
    if counted is None:
        return float(planned or run.steps)
    return float(planned) if planned and 0.8 < counted / planned < 1.25 else counted


def _counted(run: Run) -> float | None:
    """The targets that a run was trained on, as its last records count them, at the end of its schedule."""
    for record in reversed([*run.train, *run.evals]):
        tokens, step = record.get("tokens"), record.get("step")
        if isinstance(tokens, (int, float)) and tokens > 0 and step:
            return float(tokens) * run.steps / step
    return None


def common_budgets(arms: Mapping[str, Sequence[Run]], tolerance: float = SAME_BUDGET) -> dict[Path, int]:
    """The budget of each run, in tokens, the same for those that differ by the rounding to whole steps."""
    budgets = {run.path: budget_of(run) for runs in arms.values() for run in runs}
    found: dict[Path, int] = {}
    first = 0.0
    for path, budget in sorted(budgets.items(), key=lambda item: item[1]):
        if budget > first * (1 + tolerance):
            first = budget
        found[path] = round(first)
    return found


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number, and not larger than any float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)
