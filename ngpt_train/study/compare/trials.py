"""The runs of an arm as trials: budget, tuned values, seed, and the loss at the end or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ngpt_train.config.validate import show
from ngpt_train.study.compare.arms import LR, Values, seed_of, values_of
from ngpt_train.study.compare.row_losses import Rows
from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.statistics.intervals import Further, Pair
from ngpt_train.study.tuning import Tuning, best_values, tunings


@dataclass(frozen=True)
class Trial:
    """A run of an arm. loss: at the end of its schedule, in the metric; None: it failed, and `reason` says why."""

    arm: str
    run: Run
    budget: int
    values: Values
    seed: int
    loss: float | None
    reason: str = ""


@dataclass
class Arm:
    """All trials of an arm, and what they say of its tuning."""

    name: str
    trials: list[Trial]
    tunings: dict[tuple[int, str], Tuning] = field(default_factory=dict)
    best: dict[int, Values] = field(default_factory=dict)  # by budget, of those that ended
    notes: list[str] = field(default_factory=list)

    @property
    def budgets(self) -> list[int]:
        return sorted(self.best)

    @property
    def searched(self) -> list[tuple[int, str]]:
        """Budget and key wherever several values were tried."""
        return [at for at, tuning in self.tunings.items() if tuning.state != "not tried"]

    def at_best(self, budget: int) -> dict[int, Trial]:
        """By seed: the runs with the best values that were tried at this budget."""
        best = self.best.get(budget)
        return {t.seed: t for t in self.trials if t.budget == budget and t.values == best and t.loss is not None}

    def state(self, budget: int | None) -> str:
        """bracketed: the best value of each key that was tuned lies inside those tried; edge: of one it does not; not
        tried: each key has one value only."""
        states = [tuning.state for (at, _), tuning in self.tunings.items() if at == budget]
        return next((state for state in ("edge", "bracketed") if state in states), "not tried")


def unfinished(run: Run) -> str | None:
    """Why a run has nothing to compare yet; None where it has ended, well or not."""
    if failure(run) or run.is_annealed:
        return None
    if not run.evals:
        return "it has not been validated"
    return f"it was validated last after step {run.evals[-1]['step']:,} of {run.steps:,}, so that it is not annealed"


def failure(run: Run) -> str | None:
    """Why a run has no loss and will have none."""
    if run.end is not None and run.end["code"] == 4:
        return f"diverged at step {run.end['step']}: {run.end['reason']}"
    if run.end is not None and run.end["reason"].startswith("DeviceMemoryError"):
        return f"out of memory: {run.end['reason']}"
    if run.is_annealed and run.evals[-1].get("loss") is None:
        return f"its validation loss at step {run.steps} is not known, or not finite"
    return None


def read_arm(
    name: str, runs: Iterable[Run], budgets: Mapping[Path, int], tuned: Collection[str], metric: str, confidence: float
) -> Arm:
    """The arm of finished runs. Two runs of the same budget, values and seed: the first counts."""
    trials: dict[tuple[int, Values, int], Trial] = {}
    notes = []
    for run in runs:
        budget, values, seed = budgets[run.path], values_of(run, tuned), seed_of(run)
        reason = failure(run)
        loss = None if reason else run.evals[-1].get(metric)
        if reason is None and loss is None:
            reason, loss = f"its validation has no {metric}", None
        trial = Trial(name, run, budget, values, seed, loss, reason or "")
        if (first := trials.setdefault((budget, values, seed), trial)) is not trial:
            notes.append(f"{run.path} is left out: it is the same point as {first.run.path}")
    arm = Arm(name, sorted(trials.values(), key=lambda t: (t.budget, repr(t.values), t.seed)), notes=notes)
    table: dict[int, dict[Values, dict[int, float]]] = {}
    for trial in arm.trials:
        of_seed = table.setdefault(trial.budget, {}).setdefault(trial.values, {})
        of_seed[trial.seed] = math.inf if trial.loss is None else trial.loss
    # No values of other keys were allowed than those that somebody listed: the best has to lie inside, and no more.
    listed = [key for key in tuned if key != LR]
    arm.tunings = tunings(table, listed=listed, confidence=confidence, complete=True)
    for budget, found in table.items():
        if (best := best_values(found, complete=True)) is not None:
            arm.best[budget] = best
            lower = best_values(found)
            if lower is not None and lower != best:
                arm.notes.append(_fewer_seeds(name, budget, lower, len(found[lower]), len(found[best])))
    return arm


def _fewer_seeds(arm: str, budget: int, values: Values, n_seeds: int, most: int) -> str:
    said = ", ".join(f"{key}={show(value)}" for key, value in values)
    return (
        f"{arm} at {budget:,} tokens: {said} has a lower mean loss, but of {n_seeds} instead of {most} seeds. "
        "It is not taken as the best before it has been trained with the others."
    )


def pair_of(arm: Arm, baseline: Arm, metric: str) -> tuple[Pair | None, list[str]]:
    """End losses at the budgets and seeds that both have, and what has to be said about them. None: none."""
    notes: list[str] = []
    budgets = sorted(set(arm.best) & set(baseline.best))
    if not budgets:
        return None, [f"{arm.name} and {baseline.name} have no budget in common"]
    cells = {b: (baseline.at_best(b), arm.at_best(b)) for b in budgets}
    if not any(one.keys() & other.keys() for one, other in cells.values()):
        notes.append(
            f"{arm.name} and {baseline.name} have no seed in common: their runs are paired in the order of seeds"
        )
        cells = {b: (_numbered(one), _numbered(other)) for b, (one, other) in cells.items()}
    cells = {b: cell for b, cell in cells.items() if cell[0].keys() & cell[1].keys()}
    seeds = sorted({s for one, other in cells.values() for s in one.keys() & other.keys()})
    losses = np.full((2, len(cells), len(seeds)), np.nan)
    runs = [[[cell[side].get(s) for s in seeds] for cell in cells.values()] for side in (0, 1)]
    for side in (0, 1):
        for k, of_budget in enumerate(runs[side]):
            for s, trial in enumerate(of_budget):
                if trial is not None and runs[1 - side][k][s] is not None:
                    losses[side, k, s] = trial.loss
    rows, why = _rows([t for side in runs for of_budget in side for t in of_budget], losses, metric)
    of_rows = (None, None) if rows is None else (rows[0], rows[1])
    if rows is None:
        notes.append(f"{arm.name} and {baseline.name}: without the noise of validation rows, because {why}")
    further, why = _further(baseline, list(cells), None if rows is None else runs[0], metric)
    notes += [f"{baseline.name}: {why}"] if why else []
    return Pair(np.array(list(cells), float), losses[0], losses[1], of_rows[0], of_rows[1], further), notes


def _further(
    baseline: Arm, shared: Sequence[int], paired: Sequence[Sequence[Trial | None]] | None, metric: str
) -> tuple[Further | None, str]:
    """The baseline's budgets that the arm lacks, where they are tuned as the others are: else the loss is a bound, by
    which the baseline would seem to gain less from tokens than it does. Also why some are not part of the fit.

    paired: the baseline's runs at the shared budgets, whose rows these must have; None where rows are not looked at.
    """
    states = {baseline.state(budget) for budget in shared} - {"edge"}
    others = [budget for budget in baseline.budgets if budget not in shared]
    left = ", ".join(f"{budget:,}" for budget in others if baseline.state(budget) not in states)
    said = f"its losses at {left} tokens are not part of the fit, because it is not tuned there as elsewhere"
    said = said if left else ""
    others = [budget for budget in others if baseline.state(budget) in states]
    if not others:
        return None, said
    runs = [list(baseline.at_best(budget).values()) for budget in others]
    losses = np.full((len(runs), max(map(len, runs))), np.nan)
    for k, of_budget in enumerate(runs):
        losses[k, : len(of_budget)] = [trial.loss for trial in of_budget]
    if paired is None:
        return Further(np.array(others, float), losses), said
    first = next(trial for of_budget in paired for trial in of_budget if trial is not None)
    filled: list[Trial | None] = [first]
    for of_budget in runs:
        filled += [*of_budget, *[None] * (losses.shape[1] - len(of_budget))]
    rows, why = _rows(filled, np.concatenate([[first.loss], losses.reshape(-1)]), metric)
    if rows is None:
        return None, f"its further budgets are not part of the fit, because {why}"
    return Further(np.array(others, float), losses, rows[1:].reshape(*losses.shape, -1)), said


def _numbered(trials: Mapping[int, Trial]) -> dict[int, Trial]:
    return dict(enumerate(trials[seed] for seed in sorted(trials)))


def _rows(trials: Sequence[Trial | None], losses: np.ndarray, metric: str) -> tuple[np.ndarray | None, str]:
    """(2, K, S, R): what each row adds to each of the (2, K, S) losses; or why that is not known."""
    first: Rows | None = None
    found: list[np.ndarray | None] = []
    for trial, loss in zip(trials, losses.reshape(-1), strict=True):
        if trial is None or np.isnan(loss):
            found.append(None)
            continue
        rows = trial.run.rows
        if rows is None:
            return None, f"{trial.run.path} has no losses of rows"
        first = first or rows
        if rows.rows_hash != first.rows_hash or not np.array_equal(rows.n_targets, first.n_targets):
            return None, "their runs were validated on different rows"
        if not (np.isfinite(rows.loss_sum).all() and rows.n_targets.sum() > 0):
            return None, f"{trial.run.path} has rows whose loss is not finite"
        mean = rows.loss_sum.sum() / rows.n_targets.sum()
        # One factor for the run, such as nats per token to bits per byte.
        scale = loss / mean if metric != "loss" and mean else 1.0
        found.append(scale * len(rows.n_targets) * (rows.loss_sum - rows.n_targets * mean) / rows.n_targets.sum())
    if first is None:
        return None, "no run has an end loss"
    blank = np.full(len(first.n_targets), np.nan)
    return np.stack([blank if x is None else x for x in found]).reshape(*losses.shape, -1), ""
