"""The tuning of a study: its next points, a pure function of the results so far, and the judgment of a key's values,
which finds the best one, worse ones on both sides, and the parabola through them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ngpt_train.config.architectures import all_keys
from ngpt_train.study.definition import LR, Study
from ngpt_train.study.points import DONE, Point, Result

Values = tuple[tuple[str, Any], ...]  # (tuned key, value), sorted by key
# trials[values][seed]: end loss of an arm at a budget; infinite after divergence, NaN after another failure.
Trials = dict[Values, dict[int, float]]
# Beginning and end of reasons of failures that another learning rate does not change.
OUT_OF_MEMORY, CRASHED = "out of memory", "attempts)"
# Widens the noise. The losses decided which values were tried and when the search ended. If the values of a seed share
# no noise, intervals from sigma itself would hold the optimum in 90 of 100 searches instead of 95.
CHOSEN = 1.15


def next_points(study: Study, starts: Callable[[str, int], float], results: Mapping[Point, Result]) -> list[Point]:
    """The points that can run now, also unfinished ones. None are left in a complete study.

    starts(arm, budget): the recipe's learning rate. results: only final ones count.

    Each arm goes through rounds. The points of a round depend only on the losses of earlier rounds. So a study ends
    with the same points in whatever order they finish, and after a kill.
    """
    wanted = []
    for arm in study.arms:
        finished = _finished(study, arm, results)
        known: dict[int, Trials] = {budget: {} for budget in study.budgets}
        while True:
            batch = _round(study, arm, starts, known)
            missing = [point for point in batch if point not in finished]
            if missing:
                wanted += missing
                break
            # Points outside of all rounds, from before a change of the study, count at the end.
            added = batch or [p for p in finished if p.seed not in known[p.budget].get(p.values, {})]
            if not added:
                break
            for point in added:
                known[point.budget].setdefault(point.values, {})[point.seed] = finished[point]
    return wanted


def tunings(
    trials: Mapping[int, Trials], listed: Collection[str] = (), confidence: float = 0.95, complete: bool = False
) -> dict[tuple[int, str], Tuning]:
    """The tuning of an arm by budget and key, with the other keys at their best values.

    trials: by budget. listed: keys with a list of allowed values. complete: see `best_values`.
    """
    sigma, degrees = noise_between_seeds(trials.values())
    found = {}
    for budget, of_budget in trials.items():
        best = best_values(of_budget, complete)
        for key in sorted({key for values in of_budget for key, _ in values}):
            line = line_of(of_budget, key, best)
            found[budget, key] = analyse(line, sigma, key in listed, confidence, degrees)
    return found


def noise_between_seeds(trials: Iterable[Trials]) -> tuple[float, float]:
    """The pooled standard deviation of the end loss between seeds, and its degrees of freedom (0: unknown).

    It is not too small for comparisons of values by the same seeds, in which a part of the noise cancels.
    """
    squares = degrees = 0.0
    for of_budget in trials:
        for losses in of_budget.values():
            finite = [loss for loss in losses.values() if math.isfinite(loss)]
            if len(finite) > 1:
                squares += (len(finite) - 1) * statistics.variance(finite)
                degrees += len(finite) - 1
    return (math.sqrt(squares / degrees), degrees) if degrees else (0.0, 0.0)


def best_values(trials: Trials, complete: bool = False) -> Values | None:
    """The values with the lowest mean loss over their seeds; None if all have failed.

    complete: only values with the most seeds, since fewer seeds may be luck. A search adds the missing seeds instead.
    """
    means = {values: statistics.fmean(losses.values()) for values, losses in trials.items()}
    finite = [values for values, mean in means.items() if math.isfinite(mean)]
    most = max((len(trials[values]) for values in finite), default=0)
    finite = [values for values in finite if not complete or len(trials[values]) == most]

    def order(values: Values) -> tuple[float, int, float, str]:
        return means[values], -len(trials[values]), dict(values).get(LR) or 0.0, repr(values)

    return min(finite, key=order, default=None)


def line_of(trials: Trials, key: str, best: Values | None) -> Line:
    """The runs of a key that have their other keys at the best values."""
    others = None if best is None else _without(best, key)
    runs: dict[Any, dict[int, float]] = {}
    for values, losses in trials.items():
        if others is None or _without(values, key) == others:
            runs.setdefault(dict(values)[key], {}).update(losses)
    return Line(runs, None if best is None else dict(best)[key])


def _finished(study: Study, arm: str, results: Mapping[Point, Result]) -> dict[Point, float]:
    """The end losses of an arm's points within the study, with failures as in `Trials`."""
    finished = {}
    for point in sorted(results, key=repr):
        result, keys = results[point], {key for key, _ in point.values}
        if point.arm != arm or point.budget not in study.budgets or point.seed not in study.seeds:
            continue
        if keys == set(study.tune) and result.is_final:
            is_done = result.state == DONE and result.loss is not None and math.isfinite(result.loss)
            is_other = result.reason.startswith(OUT_OF_MEMORY) or result.reason.endswith(CRASHED)
            failure = math.nan if is_other else math.inf
            finished[point] = float(result.loss or 0.0) if is_done else failure
    return finished


def _round(study: Study, arm: str, starts: Callable[[str, int], float], known: Mapping[int, Trials]) -> list[Point]:
    """The next points of an arm. A budget begins after the smaller ones are complete."""
    sigma, _ = noise_between_seeds(known.values())
    points: list[Point] = []
    for number, budget in enumerate(study.budgets):
        lattice = Lattice(starts(arm, budget), study.tune[LR])
        if known[budget]:
            found = _next_of_budget(study, lattice, known[budget], sigma)
        elif points:
            break
        else:
            smaller = {b: known[b] for b in study.budgets[:number]}
            found = [(values, study.seeds[0]) for values in _beginning(study, lattice, budget, smaller)]
        points += [Point(arm, budget, values, seed) for values, seed in found]
    return points


def _beginning(study: Study, lattice: Lattice, budget: int, smaller: Mapping[int, Trials]) -> list[Values]:
    """The first points of a budget: a centre and its two neighbours in lr. Other keys have the best values of the
    smaller budgets, or the first listed values."""
    centre: dict[str, Any] = {key: values[0] for key, values in study.listed.items()}
    for trials in smaller.values():
        centre.update(best_values(trials) or ())
    lr = lattice.nearest(_expected_lr(budget, smaller) or lattice.start)
    return [_values(centre | {LR: each}) for each in [lr, *lattice.neighbours(lr)][: study.max_points]]


def _expected_lr(budget: int, smaller: Mapping[int, Trials]) -> float | None:
    """The best lr at a budget, by a fit of log lr over log budget; with one smaller budget, its best lr."""
    found = {b: tuning for (b, key), tuning in tunings(smaller).items() if key == LR}
    inside = {b: tuning.optimum for b, tuning in found.items() if tuning.optimum is not None}
    if len(inside) > 1:
        fit = statistics.linear_regression([math.log(b) for b in inside], [math.log(lr) for lr in inside.values()])
        return math.exp(fit.slope * math.log(budget) + fit.intercept)
    bests = [*inside.values()] or [tuning.best for tuning in found.values() if tuning.best is not None]
    return bests[-1] if bests else None


def _next_of_budget(study: Study, lattice: Lattice, trials: Trials, sigma: float) -> list[tuple[Values, int]]:
    """The missing points around the best point: neighbours in lr, rates between them, its other seeds, worse points on
    both sides, other values of the further keys. A better point among them is the best of the next round."""
    first = study.seeds[0]
    best = best_values(trials)
    room = study.max_points * len(study.tune) - len(trials)
    if best is None:
        if room <= 0 or not any(math.inf in losses.values() for losses in trials.values()):
            return []
        lowest = min(trials, key=lambda values: (dict(values)[LR], repr(values)))  # the rates are too high
        return [(_with(lowest, LR, lattice.below(dict(lowest)[LR])), first)]
    line = line_of(trials, LR, best)
    room_in_line = max(0, min(room, study.max_points - len(line.values)))
    neighbours = [lr for lr in lattice.neighbours(dict(best)[LR]) if lr not in line.values][:room_in_line]
    if neighbours:
        return [(_with(best, LR, lr), first) for lr in neighbours]
    if study.refine and (finer := [lr for lr in lattice.between(line) if lr not in line.values][:room_in_line]):
        return [(_with(best, LR, lr), first) for lr in finer]
    if absent := [seed for seed in study.seeds if seed not in trials[best]]:
        return [(best, seed) for seed in absent]
    below, above = line.worse(sigma)
    outwards: list[float | None] = [] if below else [lattice.below(line.values[0])]
    outwards += [] if above else [lattice.above(line.values[-1])]
    if outer := [lr for lr in outwards if lr is not None][:room_in_line]:
        return [(_with(best, LR, lr), first) for lr in outer]
    for key, listed in study.listed.items():
        of_key = [_with(best, key, value) for value in listed][: study.max_points]
        if untried := [values for values in of_key if values not in trials][: max(0, room)]:
            return [(values, first) for values in untried]
    return []


class Lattice:
    """The tried learning rates: the recipe's times whole powers of the factor. They have six digits, like the names of
    runs, so studies share them."""

    def __init__(self, start: float, factor: float) -> None:
        self.start, self._factor = start, factor
        self._highest = all_keys()[LR].maximum or math.inf

    def below(self, lr: float) -> float:
        """The highest rate below `lr`. `lr` itself may lie between two rates."""
        return self._at(math.ceil(self._power(lr) - 1e-4) - 1)

    def above(self, lr: float) -> float | None:
        rate = self._at(math.floor(self._power(lr) + 1e-4) + 1)
        return rate if rate <= self._highest else None

    def nearest(self, lr: float) -> float:
        return self._at(round(self._power(lr)))

    def neighbours(self, lr: float) -> list[float]:
        return [rate for rate in (self.below(lr), self.above(lr)) if rate is not None]

    def between(self, line: Line) -> list[float]:
        """The rates to try between those of the factor, once the best has worse ones on both sides: of the lattice of
        the factor's root the one nearest to the parabola's vertex, which may be the best itself, or both neighbours of
        the best if there is no parabola."""
        below, above = line.worse(0.0)
        if not below or not above:
            return []
        finer = Lattice(self.start, math.sqrt(self._factor))
        vertex = _vertex(line, max(below), min(above), 0.0)
        return finer.neighbours(line.best) if vertex is None else [finer.nearest(vertex[0])]

    def _power(self, lr: float) -> float:
        return math.log(lr / self.start) / math.log(self._factor)

    def _at(self, power: int) -> float:
        return float(f"{self.start * self._factor**power:.6g}")


def _values(values: Mapping[str, Any]) -> Values:
    return tuple(sorted(values.items()))


def _with(values: Values, key: str, value: Any) -> Values:
    return _values(dict(values) | {key: value})


def _without(values: Values, key: str) -> dict[str, Any]:
    return {name: value for name, value in values if name != key}


@dataclass(frozen=True)
class Tuning:
    """The tuning of one key, all else equal. None if unknown: a parabola needs a bracket and three finite losses."""

    state: str  # "bracketed"; "edge": untuned, the optimum may lie outside the tried values; "not tried": one value
    best: Any = None  # the tried value with the lowest mean loss over its seeds
    optimum: float | None = None  # vertex of the parabola in log value
    low: float | None = None  # interval of the optimum, within the tried values
    high: float | None = None
    price_of_two: float | None = None  # loss at twice or half the optimum, less the loss at the optimum

    @property
    def price_of_grid(self) -> float | None:
        """The parabola's loss at the best value less its loss at the optimum: the possible gain of a finer grid."""
        if self.best is None or self.optimum is None or self.price_of_two is None:
            return None
        return float(self.price_of_two * math.log2(self.best / self.optimum) ** 2)


def analyse(
    line: Line, sigma: float, listed: bool = False, confidence: float = 0.95, degrees: float = math.inf
) -> Tuning:
    """Judges the runs of one key.

    sigma: standard deviation of the end loss between seeds, with `degrees` degrees of freedom. With 0, as for one seed,
    the interval is unknown. A value is worse than the best if its mean loss is higher by more than sigma, also over the
    shared seeds. listed: no other values are allowed, so the best only has to lie inside.
    """
    tried, best = line.values, line.best
    if len(tried) < 2:
        return Tuning("not tried", best)
    if best is None:
        return Tuning("edge")
    if not all(is_number(value) for value in tried):
        return Tuning("bracketed", best)  # names and switches have no order and so no edge
    below, above = line.worse(0.0 if listed else sigma, or_equal=listed)
    if not (below or best == 0) or not above:  # no value is below 0
        return Tuning("edge", best)
    if not below or min(tried) <= 0:
        return Tuning("bracketed", best)
    left, right = max(below), min(above)
    quantile = float(stdtrit(min(degrees, 1e9), (1 + confidence) / 2)) if degrees else math.inf  # Student's t
    vertex = _vertex(line, left, right, quantile * sigma if degrees else math.inf)
    if vertex is None:
        return Tuning("bracketed", best, float(best), float(left), float(right))
    optimum, low, high, curvature = vertex
    found = Tuning("bracketed", best, optimum, low, high, curvature * math.log(2) ** 2)
    return found if degrees else replace(found, low=None, high=None)


class Line:
    """The runs of one key: end losses by value and seed. A value with a failed seed has an infinite mean. best: None if
    all have failed."""

    def __init__(self, runs: Mapping[Any, Mapping[int, float]], best: Any) -> None:
        self.best = best
        self._runs = {
            value: {seed: float(loss) if math.isfinite(loss) else math.inf for seed, loss in losses.items()}
            for value, losses in runs.items()
        }
        self.values = sorted(runs) if all(is_number(value) for value in runs) else list(runs)

    def mean(self, value: Any) -> float:
        return statistics.fmean(self._runs[value].values())

    def count(self, value: Any) -> int:
        return len(self._runs[value])

    def worse(self, sigma: float, or_equal: bool = False) -> tuple[list[Any], list[Any]]:
        """The values below and above the best value, worse by more than sigma."""
        worse = [
            v for v in self.values if v != self.best and (self._gap(v) > sigma or (or_equal and self._gap(v) >= 0))
        ]
        return [value for value in worse if value < self.best], [value for value in worse if value > self.best]

    def _gap(self, value: Any) -> float:
        """The loss of a value less the best's: by means, or over shared seeds, the smaller of the two.

        Most values have the first seed alone. If this seed is hard, the means alone would call them bad. The shared
        seeds alone would trust the luck of the best.
        """
        gap = self.mean(value) - self.mean(self.best)
        of_best = self._runs[self.best]
        pairs = [loss - of_best[seed] for seed, loss in self._runs[value].items() if seed in of_best]
        return min(gap, statistics.fmean(pairs)) if pairs else gap


def _vertex(line: Line, left: Any, right: Any, noise: float) -> tuple[float, float, float, float] | None:
    """Optimum, both ends of its interval, and c; None without a parabola.

    Weighted least squares of a + b x + c x², x = ln(value / best), through the values from `left` to `right`. The
    interval is every x whose slope b + 2 c x does not differ from 0 (Fieller's theorem). noise: half the width of the
    interval of one loss.
    """
    best = line.best
    inside = [value for value in line.values if left <= value <= right]
    nearest = [max(v for v in inside if v < best), best, min(v for v in inside if v > best)]
    ends = math.log(left / best), math.log(right / best)
    for window in (inside, nearest):  # an odd one among many values may bend the parabola; three cannot be bent
        means = np.array([line.mean(value) for value in window])
        if not np.isfinite(means).all():
            continue
        x = np.array([math.log(value / best) for value in window])
        design = np.stack([np.ones_like(x), x, x**2], axis=1)  # (n, 3)
        weights = np.array([line.count(value) for value in window], dtype=float)
        inverse = np.linalg.inv(design.T @ (weights[:, None] * design))  # (3, 3)
        _, b, c = inverse @ (design.T @ (weights * means))
        if c <= 0 or not ends[0] < -b / (2 * c) < ends[1]:
            continue
        # (b + 2 c x)² <= noise² var(b + 2 c x): a quadratic p x² + 2 q x + r <= 0.
        cov = (CHOSEN * noise) ** 2 * inverse
        p, q, r = 4 * (c**2 - cov[2, 2]), 2 * (b * c - cov[1, 2]), b**2 - cov[1, 1]
        low, high = math.log(line.values[0] / best), math.log(line.values[-1] / best)
        if p > 0:  # else the curvature is not resolved
            half = math.sqrt(max(q**2 - p * r, 0.0))
            low, high = max(low, (-q - half) / p), min(high, (-q + half) / p)
        optimum, low, high = (float(best * math.exp(at)) for at in (-b / (2 * c), low, high))
        return optimum, min(low, optimum), max(high, optimum), float(c)
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
