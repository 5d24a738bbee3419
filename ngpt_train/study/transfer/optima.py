"""The best learning rate of each architecture, width, depth and budget in directories of studies and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.study.bracket import Tuning
from ngpt_train.study.compare.arms import found_arms
from ngpt_train.study.compare.given_runs import gather
from ngpt_train.study.compare.runs import Run, common_budgets
from ngpt_train.study.compare.trials import read_arm, unfinished
from ngpt_train.study.definition import LR

# Keys that change with the width, depth and length of a run.
SIZES = {
    *(f"model.{name}" for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "n_encoder_layers")),
    "train.steps",
}


@dataclass(frozen=True)
class Optimum:
    """The best learning rate at a size and budget. architecture: a name for all keys but the sizes."""

    architecture: str
    width: int
    depth: int
    tokens: int
    tuning: Tuning
    n_seeds: int  # at the best tried value
    model: str  # model.name of its runs
    context: int

    @property
    def is_tuned(self) -> bool:
        return self.tuning.state == "bracketed" and self.tuning.optimum is not None


@dataclass(frozen=True)
class Optima:
    """Optima with the confidence of their intervals, and sentences about left-out runs."""

    found: list[Optimum]
    metric: str
    confidence: float
    notes: list[str]


def read_optima(paths: Sequence[Path], confidence: float | None = None) -> Optima:
    """The optima of studies, runs, and directories of runs. Raises DataError if a directory has no run, or no run has
    ended."""
    runs: list[Run] = []
    tuned, metrics, confidences = {LR}, set[str](), list[float]()
    for path in paths:
        gathered = gather([path])
        tuned |= set(gathered.tuned or ())
        metrics.add(gathered.metric or "loss")
        confidences.append(gathered.confidence)
        seen = {run.path.resolve() for run in runs}
        runs += [run for run in gathered.runs if run.path.resolve() not in seen]
    if len(metrics) > 1:
        raise DataError("the studies have different metrics: loss, and bits per byte. Name those of one metric.")
    reasons = {run.path: reason for run in runs if (reason := unfinished(run))}
    notes = [f"{path} is left out: {reason}" for path, reason in reasons.items()]
    ended = [run for run in runs if run.path not in reasons]
    if not ended:
        raise DataError(f"no run has ended in {', '.join(map(str, paths))}")
    confidence, (metric,) = confidence or max(confidences), metrics
    found = []
    groups = found_arms(ended, {*tuned, *SIZES})
    budgets = common_budgets(groups)
    for name, group in groups.items():
        for (width, depth), of_size in sorted(_by_size(group).items()):
            arm = read_arm(name, of_size, budgets, tuned, metric, confidence)
            for (budget, key), tuning in sorted(arm.tunings.items()):
                if key == LR:
                    model, n_seeds = str(of_size[0].config["model.name"]), len(arm.at_best(budget))
                    context = _size(of_size[0], "context")
                    found.append(Optimum(name, width, depth, budget, tuning, n_seeds, model, context))
    return Optima(found, metric, confidence, notes)


def _by_size(runs: Sequence[Run]) -> dict[tuple[int, int], list[Run]]:
    sizes: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        sizes.setdefault((_size(run, "d_model"), _size(run, "n_layers")), []).append(run)
    return sizes


def _size(run: Run, name: str) -> int:
    value: Any = run.config.get(f"model.{name}", getattr(ModelConfig, name))
    return int(value)
