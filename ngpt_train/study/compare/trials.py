"""The runs of an arm as trials: budget, tuned values, seed, and the end loss or the reason of a failure. Its prices: by
how much its loss at the compared values may lie above that at the best ones, between the values tried and where a
seed diverges."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.validate import show
from ngpt_train.core.constants import DIVERGED
from ngpt_train.core.recorded import compared
from ngpt_train.study.compare.arms import hashable, values_of
from ngpt_train.study.compare.noise import Further, Pair, t_quantile
from ngpt_train.study.compare.runs import Rows, Run
from ngpt_train.study.definition import LR
from ngpt_train.study.descent import OUT_OF_RUNS, ends_of
from ngpt_train.study.tuning import Trials, Tuning, Values, best_values, line_of, noise_between_seeds, tunings

AFTER_DIVERGENCE = "diverged"  # the beginning of a reason
NO_PRICE = (0.0, 0.0)


@dataclass(frozen=True)
class Trial:
    """A run of an arm. loss: at the end of its schedule, in the metric; None if it failed, for `reason`."""

    arm: str
    run: Run
    budget: int
    values: Values
    seed: int
    loss: float | None
    reason: str = ""


@dataclass(frozen=True)
class Divergence:
    """Values at which some seeds of an arm diverge and the others end lower than at the compared values."""

    values: Values
    seeds: tuple[int, ...]  # that diverge
    n_seeds: int  # tried
    price: tuple[float, float]  # nats by which the others end lower; how much more that may be


UNTUNED = ("edge", "elsewhere")  # states of an arm


@dataclass
class Arm:
    """The trials of an arm, and its tuning."""

    name: str
    trials: list[Trial]
    tunings: dict[tuple[int, str], Tuning] = field(default_factory=dict)
    best: dict[int, Values] = field(default_factory=dict)  # best[budget]; a budget without a loss is missing
    prices: dict[int, tuple[float, float]] = field(default_factory=dict)  # of the grid, by budget
    divergences: dict[int, Divergence] = field(default_factory=dict)  # by budget, where there is one
    notes: list[str] = field(default_factory=list)

    @property
    def budgets(self) -> list[int]:
        return sorted(self.best)

    @property
    def tried(self) -> dict[str, dict[int, set[Any]]]:
        """tried[key][budget]: the values of a key."""
        found: dict[str, dict[int, set[Any]]] = {}
        for trial in self.trials:
            for key, value in trial.values:
                found.setdefault(key, {}).setdefault(trial.budget, set()).add(value)
        return found

    def at_best(self, budget: int) -> dict[int, Trial]:
        """By seed: the trials with the best values at this budget."""
        best = self.best.get(budget)
        return {t.seed: t for t in self.trials if t.budget == budget and t.values == best and t.loss is not None}

    def state(self, budget: int | None) -> str:
        """edge: the best value of a tuned key is at an edge of the tried values; elsewhere: a key was tuned at other
        budgets alone; bracketed: neither; not tried: each key has a single value."""
        states = {key: tuning.state for (at, key), tuning in self.tunings.items() if at == budget}
        tuned = {key for (_, key), tuning in self.tunings.items() if tuning.state != "not tried"}
        if "edge" not in states.values() and any(states[key] == "not tried" for key in tuned & states.keys()):
            return "elsewhere"
        return next((state for state in ("edge", "bracketed") if state in states.values()), "not tried")


def unfinished(run: Run) -> str | None:
    """The reason to leave a run out, because it has not ended; None if it has ended or failed."""
    if failure(run) or run.is_annealed:
        return None
    if not run.evals:
        return "it has not been validated"
    return f"it was validated last after step {run.evals[-1]['step']:,} of {run.steps:,}, so that it is not annealed"


def failure(run: Run) -> str | None:
    """The reason of a failure, after which the run will never have a loss; None if it has not failed."""
    if run.end is not None and run.end["code"] == DIVERGED:
        return f"{AFTER_DIVERGENCE} at step {run.end['step']}: {run.end['reason']}"
    if run.end is not None and run.end["reason"].startswith("DeviceMemoryError"):
        return f"out of memory: {run.end['reason']}"
    if run.is_annealed and run.evals[-1].get("loss") is None:
        return f"its validation loss at step {run.steps} is not known, or not finite"
    return None


def read_arm(
    name: str,
    runs: Sequence[Run],
    budgets: Mapping[Path, int],
    tuned: Collection[str],
    metric: str,
    confidence: float,
    descent: Sequence[Mapping[str, Any]] = (),
) -> Arm:
    """The arm of finished runs. Of two runs with equal budget, values and seed the first counts. descent: phases."""
    trials: dict[tuple[int, Values, int], Trial] = {}
    notes = []
    tuned = [key for key in tuned if key == LR or any(key in run.config for run in runs)]
    for run in runs:
        budget, values, seed = budgets[run.path], values_of(run, tuned), run.seed
        reason = failure(run)
        loss = None if reason else compared(run.evals[-1], metric)
        if reason is None and loss is None:
            reason = f"its validation has no {metric}"
        trial = Trial(name, run, budget, values, seed, loss, reason or "")
        if (first := trials.setdefault((budget, values, seed), trial)) is not trial:
            notes.append(f"{run.path} is left out: it is the same point as {first.run.path}")
    arm = Arm(name, sorted(trials.values(), key=lambda t: (t.budget, repr(t.values), t.seed)), notes=notes)
    table: dict[int, Trials] = {}  # by budget
    for trial in arm.trials:
        of_seed = table.setdefault(trial.budget, {}).setdefault(trial.values, {})
        failed = math.inf if trial.reason.startswith(AFTER_DIVERGENCE) else math.nan
        of_seed[trial.seed] = failed if trial.loss is None else trial.loss
    # The values of other keys were listed by hand. Their best only has to lie inside the list.
    listed = [key for key in tuned if key != LR]
    ends = {at: {key: hashable(x) for key, x in end.items()} for at, end in ends_of(descent).items()}
    arm.tunings = tunings(table, listed, confidence, complete=True, ends=ends)
    for phase in descent:
        place = phase["budget"], phase["key"]
        if phase["state"] == OUT_OF_RUNS and place in arm.tunings and arm.tunings[place].state == "not tried":
            arm.tunings[place] = Tuning("edge", arm.tunings[place].best)
    for budget, found in table.items():
        if (best := best_values(found, complete=True, end=ends.get(budget))) is not None:
            arm.best[budget] = best
            of_budget = {key: tuning for (at, key), tuning in arm.tunings.items() if at == budget}
            arm.prices[budget] = price_of_grid(found, of_budget, best)
            if diverged := divergence(found, best, confidence):
                arm.divergences[budget] = diverged
            lower = best_values(found, end=ends.get(budget))
            if lower is not None and lower != best:
                arm.notes.append(_fewer_seeds(name, budget, lower, len(found[lower]), len(found[best])))
    return arm


def price_of_grid(trials: Trials, by_key: Mapping[str, Tuning], best: Values) -> tuple[float, float]:
    """The estimate for an arm at a budget, and how much more it may be, in nats, by the parabolas of its keys.

    by_key: the tunings. A key's optimum lies in its interval, and nearer to the best value than to the values tried
    beside it: else one of these would be the best. Keys without a parabola have the price 0, and at the end of a list
    what the next value may gain.
    """
    found = [(0.0, tuning.beyond) for tuning in by_key.values()]
    for key, tuning in by_key.items():
        price, of_two, value = tuning.price_of_grid, tuning.price_of_two, tuning.best
        if price is not None and of_two is not None:
            tried = line_of(trials, key, best).values
            low = max(tuning.low or 0.0, math.sqrt(value * max(x for x in tried if x < value)))
            high = min(tuning.high or math.inf, math.sqrt(value * min(x for x in tried if x > value)))
            most = of_two * max(math.log2(value / low), math.log2(high / value), 0.0) ** 2
            found.append((min(price, most), max(most - price, 0.0)))
    return sum(estimate for estimate, _ in found), math.hypot(*(more for _, more in found))


def divergence(trials: Trials, best: Values, confidence: float) -> Divergence | None:
    """The one with the lowest losses; None without one. trials: as in a study's tuning, infinite after a divergence."""
    found = []
    for values, losses in trials.items():
        seeds = tuple(seed for seed, loss in losses.items() if loss == math.inf)
        gains = [trials[best][s] - loss for s, loss in losses.items() if s in trials[best] and math.isfinite(loss)]
        if seeds and gains and (gain := statistics.fmean(gains)) > 0:
            sigma, df = noise_between_seeds([trials])
            more = float(t_quantile(confidence, df)) * sigma * math.sqrt(2 / len(gains)) if df else 0.0
            found.append(Divergence(values, seeds, len(losses), (gain, more)))
    return max(found, key=lambda x: x.price[0], default=None)


def _fewer_seeds(arm: str, budget: int, values: Values, n_seeds: int, most: int) -> str:
    said = ", ".join(f"{key}={show(value)}" for key, value in values)
    lower = f"{arm} at {budget:,} tokens: {said} has a lower mean loss, but of {n_seeds} instead of {most} seeds"
    return f"{lower}. It is not taken as the best before it has been trained with the others."


def pair_of(arm: Arm, baseline: Arm, metric: str) -> tuple[Pair | None, list[str]]:
    """End losses at the budgets and seeds of both arms, and notes. None if they have no budget in common."""
    names, notes = f"{arm.name} and {baseline.name}", []
    cells = {b: (baseline.at_best(b), arm.at_best(b)) for b in sorted(set(arm.best) & set(baseline.best))}
    if not cells:
        return None, [f"{names} have no budget in common"]
    if apart := [b for b, (one, other) in cells.items() if not one.keys() & other.keys()]:
        at = "" if len(apart) == len(cells) else f" at {', '.join(f'{b:,}' for b in apart)} tokens"
        notes.append(f"{names} have no seed in common{at}: their runs are paired in the order of seeds")
        cells |= {b: (_numbered(cells[b][0]), _numbered(cells[b][1])) for b in apart}
    trials, losses, rows, why = crossed(cells, metric)
    if rows is None:
        notes.append(f"{names}: without the noise of validation rows, because {why}")
    prices = np.array([[x.prices[b] for x in (baseline, arm)] for b in cells])
    unstable = np.array([[divergence_price(x, b) for x in (baseline, arm)] for b in cells])
    further, why = _further(baseline, list(cells), None if rows is None else next(filter(None, trials)), metric)
    notes += [f"{baseline.name}: {why}"] if why else []
    one, other = (None, None) if rows is None else rows
    pair = Pair(np.array(list(cells), float), losses[0], losses[1], one, other, further, prices, unstable)
    return pair, notes


def crossed(
    cells: Mapping[int, Sequence[Mapping[int, Trial]]], metric: str
) -> tuple[list[Trial | None], np.ndarray, np.ndarray | None, str]:
    """The trials of N arms at K budgets with the S seeds that all have there; their end losses, `(N, K, S)`, NaN for no
    trial; and the part of each row in them, `(N, K, S, R)`, or None and the reason.

    cells[budget]: the trials of each arm by seed.
    """
    shared = {budget: set.intersection(*map(set, arms)) for budget, arms in cells.items()}
    seeds = sorted(set().union(*shared.values()))
    n_arms = len(next(iter(cells.values())))
    trials = [cells[b][n][s] if s in shared[b] else None for n in range(n_arms) for b in cells for s in seeds]
    losses = losses_of(trials).reshape(n_arms, len(cells), len(seeds))
    rows, why = rows_of(trials, metric)
    return trials, losses, None if rows is None else rows.reshape(*losses.shape, -1), why


def _further(baseline: Arm, shared: Sequence[int], first: Trial | None, metric: str) -> tuple[Further | None, str]:
    """The baseline's losses at budgets which the arm lacks, and the reason why some are not part of the fit.

    Only budgets tuned like the shared ones count. An untuned loss is a bound, and would hide what the baseline gains
    from more tokens. first: a trial with the rows that all must have; None if rows are not compared.
    """
    states = {baseline.state(budget) for budget in shared} - {"edge"}
    further = [budget for budget in baseline.budgets if budget not in shared]
    others = [budget for budget in further if baseline.state(budget) in states]
    left, said = ", ".join(f"{budget:,}" for budget in further if budget not in others), ""
    if left:
        said = f"its losses at {left} tokens are not part of the fit, because it is not tuned there as elsewhere"
    if not others:
        return None, said
    runs = [list(baseline.at_best(budget).values()) for budget in others]
    width = max(map(len, runs))
    trials = [trial for of_budget in runs for trial in [*of_budget, *[None] * (width - len(of_budget))]]
    losses = losses_of(trials).reshape(len(runs), width)
    prices = np.array([baseline.prices[budget] for budget in others])
    if first is None:
        return Further(np.array(others, float), losses, None, prices), said
    rows, why = rows_of([first, *trials], metric)
    if rows is None:
        return None, f"its further budgets are not part of the fit, because {why}"
    return Further(np.array(others, float), losses, rows[1:].reshape(*losses.shape, -1), prices), said


def _numbered(trials: Mapping[int, Trial]) -> dict[int, Trial]:
    return dict(enumerate(trials[seed] for seed in sorted(trials)))


def divergence_price(arm: Arm, budget: int) -> tuple[float, float]:
    return arm.divergences[budget].price if budget in arm.divergences else NO_PRICE


def price_at(arm: Arm, budget: int) -> tuple[float, float]:
    """The price of the grid and of values at which a seed diverges: an estimate, and how much more it may be."""
    (grid, more), (diverged, also) = arm.prices[budget], divergence_price(arm, budget)
    return grid + diverged, math.hypot(more, also)


def losses_of(trials: Sequence[Trial | None]) -> np.ndarray:
    """(n,) nats; NaN for no trial."""
    return np.array([np.nan if trial is None else trial.loss for trial in trials], float)


def rows_of(trials: Sequence[Trial | None], metric: str) -> tuple[np.ndarray | None, str]:
    """(n, R): the part of each row in the loss of each trial, NaN for no trial; or None and the reason."""
    first: Rows | None = None
    found: list[np.ndarray | None] = []
    for trial in trials:
        if trial is None:
            found.append(None)
            continue
        if metric not in ("loss", "bits_per_byte", "error"):
            return None, f"{metric} is no mean over rows"
        rows = trial.run.wrong_answers if metric == "error" else trial.run.rows
        if rows is None:
            return None, f"{trial.run.path} has no losses of rows"
        first = first or rows
        if rows.rows_hash != first.rows_hash or not np.array_equal(rows.n_targets, first.n_targets):
            return None, "their runs were validated on different rows"
        if not (np.isfinite(rows.loss_sum).all() and rows.n_targets.sum() > 0):
            return None, f"{trial.run.path} has rows whose loss is not finite"
        mean = rows.loss_sum.sum() / rows.n_targets.sum()
        # One factor for the run, such as nats per token to bits per byte.
        scale = trial.loss / mean if metric == "bits_per_byte" and mean else 1.0
        found.append(scale * len(rows.n_targets) * (rows.loss_sum - rows.n_targets * mean) / rows.n_targets.sum())
    if first is None:
        return None, "no run has an end loss"
    blank = np.full(len(first.n_targets), np.nan)
    return np.stack([blank if x is None else x for x in found]), ""
