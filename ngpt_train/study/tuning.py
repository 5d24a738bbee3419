"""The judgment of a tuned key's values: the best one, worse ones on both sides, and the parabola through them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ngpt_train.config.architectures import all_keys
from ngpt_train.config.validate import Key
from ngpt_train.study.definition import LR

Values = tuple[tuple[str, Any], ...]  # (tuned key, value), sorted by key
# trials[values][seed]: end loss of an arm at a budget; infinite after divergence, NaN after another failure.
Trials = dict[Values, dict[int, float]]
# Widens the noise. The losses decided which values were tried and when the search ended. If the values of a seed share
# no noise, intervals from sigma itself would hold the optimum in 90 of 100 searches instead of 95.
CHOSEN = 1.15
OF_THE_RATE = "optim.groups."  # keys whose null is the learning rate
UNLIMITED = ("optim.clip_norm", "optim.angle_cap", "model.logit_soft_cap")  # keys whose null is no limit


def tunings(
    trials: Mapping[int, Trials],
    listed: Collection[str] = (),
    confidence: float = 0.95,
    complete: bool = False,
    ends: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[tuple[int, str], Tuning]:
    """The tuning of an arm by budget and key, with the other keys at their best values. trials: by budget. listed:
    further keys, tuned by a descent. complete, ends[budget]: see `best_values`."""
    sigma, degrees = noise_between_seeds(trials.values())
    found = {}
    for budget, of_budget in trials.items():
        best = best_values(of_budget, complete, ends.get(budget))
        for key in sorted({key for values in of_budget for key, _ in values}):
            line = line_of(of_budget, key, best)
            is_listed, limits = key in listed, all_keys().get(key)
            noise, df = noise_between_seeds([of_budget]) if is_listed else (sigma, degrees)  # as in the descent
            tuning = analyse(line, noise, is_listed, confidence, df, limits)
            lines = Counter(without(values, key) for values in of_budget)
            if is_listed and tuning.state == "not tried" and max(lines.values()) > 1:
                tuning = Tuning("edge", tuning.best)  # tried, but not with the best values of the others
            found[budget, key] = tuning
    return found


def noise_between_seeds(trials: Iterable[Trials]) -> tuple[float, float]:
    """The pooled standard deviation of the end loss between seeds, and its degrees of freedom (0: unknown). It is not
    too small for comparisons of values by the same seeds, in which a part of the noise cancels."""
    squares = degrees = 0.0
    for of_budget in trials:
        for losses in of_budget.values():
            finite = [loss for loss in losses.values() if math.isfinite(loss)]
            if len(finite) > 1:
                squares += (len(finite) - 1) * statistics.variance(finite)
                degrees += len(finite) - 1
    return (math.sqrt(squares / degrees), degrees) if degrees else (0.0, 0.0)


def best_values(trials: Trials, complete: bool = False, end: Mapping[str, Any] | None = None) -> Values | None:
    """The values with the lowest mean loss over their seeds; None if all have failed.

    A value of a further key that was tried at one learning rate or two does not count beside one whose rate was tuned.
    end: the further keys' values at which a descent has ended. No others count: one may be better, but by less than the
    noise, and no key was tuned there. complete: only values with the most seeds, since fewer seeds may be luck. A
    search adds the missing seeds instead.
    """
    if end is not None:
        trials = {values: losses for values, losses in trials.items() if end.items() <= dict(values).items()}
    rates = Counter(without(values, LR) for values in trials)
    enough = min(3, max(rates.values(), default=0))
    counted = {values: losses for values, losses in trials.items() if rates[without(values, LR)] >= enough}
    means = {values: statistics.fmean(losses.values()) for values, losses in counted.items()}
    finite = [values for values, mean in means.items() if math.isfinite(mean)]
    most = max((len(trials[values]) for values in finite), default=0)
    finite = [values for values in finite if not complete or len(trials[values]) == most]

    def order(values: Values) -> tuple[float, int, float, str]:
        return means[values], -len(trials[values]), dict(values).get(LR) or 0.0, repr(values)

    return min(finite, key=order, default=None)


def line_of(trials: Trials, key: str, best: Values | None) -> Line:
    """The runs of a key that have their other keys at the best values."""
    others = None if best is None else without(best, key)
    runs: dict[Any, dict[int, float]] = {}
    for values, losses in trials.items():
        if others is None or without(values, key) == others:
            runs.setdefault(place_of(values, key), {}).update(losses)
    return Line(runs, None if best is None else place_of(best, key))


def place_of(values: Values, key: str) -> Any:
    """The key's value in the order of its line: a number also for null, where null stands for one."""
    of = dict(values)
    if of[key] is None and key.startswith(OF_THE_RATE):
        return of[LR]
    return math.inf if of[key] is None and key in UNLIMITED else of[key]


def sorted_values(values: Mapping[str, Any]) -> Values:
    return tuple(sorted(values.items()))


def changed(values: Values, key: str, value: Any) -> Values:
    return sorted_values(dict(values) | {key: value})


def without(values: Values, key: str) -> Values:
    return tuple(pair for pair in values if pair[0] != key)


@dataclass(frozen=True)
class Tuning:
    """The tuning of one key, all else equal. None if unknown: a parabola needs a bracket and three finite losses."""

    state: str  # "bracketed"; "edge": untuned, the optimum may lie outside the tried values; "not tried": one value
    best: Any = None  # the tried value with the lowest mean loss over its seeds
    optimum: float | None = None  # vertex of the parabola in log value
    low: float | None = None  # interval of the optimum, within the tried values
    high: float | None = None
    price_of_two: float | None = None  # loss at twice or half the optimum, less the loss at the optimum
    beyond: float = 0.0  # nats that a value beyond the end of a list may gain

    @property
    def price_of_grid(self) -> float | None:
        """The parabola's loss at the best value less its loss at the optimum: the possible gain of a finer grid."""
        if self.best is None or self.optimum is None or self.price_of_two is None:
            return None
        return float(self.price_of_two * math.log2(self.best / self.optimum) ** 2)


def analyse(
    line: Line,
    sigma: float,
    listed: bool = False,
    confidence: float = 0.95,
    degrees: float = math.inf,
    limits: Key | None = None,
) -> Tuning:
    """Judges the runs of one key.

    sigma: standard deviation of the end loss between seeds, with `degrees` degrees of freedom. With 0, as for one seed,
    the interval is unknown. A value is worse than the best if its mean loss is higher by more than sigma, also over the
    shared seeds. limits: of the key's values; there is nothing to try beyond.

    listed: on both sides there only has to be a value to which the descent does not go. The end of the list is an edge
    if it is better than the value before it by more than two standard errors. Else it may be the best by chance, and
    where losses are convex in the log value, the next step gains less than the last.
    """
    tried, best = line.values, line.best
    if len(tried) < 2:
        return Tuning("not tried", best)
    if best not in tried or not math.isfinite(line.mean(best)):  # all have failed; null may be the best value
        return Tuning("edge")
    if not all(is_number(value) for value in tried):
        return Tuning("bracketed", best)  # names and switches have no order and so no edge
    below, above = line.tried_and_left(sigma) if listed else line.worse(sigma)
    least, most = (0, None) if limits is None else (limits.minimum, limits.maximum)
    if not (below or best in (0, least)) or not (above or best in (math.inf, most)):
        before = {tried[0]: tried[1], tried[-1]: tried[-2]}.get(best)  # an end: the value before it
        if listed and degrees and before in (*below, *above):
            gain, n_seeds = line.gain_over(before)
            if gain <= 2 * sigma * math.sqrt(2 / n_seeds):
                return Tuning("bracketed", best, beyond=max(gain, 0.0))
        return Tuning("edge", best)
    left, right = max(below, default=0), min(above, default=math.inf)
    if left <= 0 or right == math.inf:  # no parabola in log value
        return Tuning("bracketed", best)
    quantile = float(stdtrit(min(degrees, 1e9), (1 + confidence) / 2)) if degrees else math.inf  # Student's t
    vertex = vertex_of(line, left, right, quantile * sigma if degrees else math.inf)
    if vertex is None:
        return Tuning("bracketed", best, float(best), float(left), float(right))
    optimum, low, high, curvature = vertex
    found = Tuning("bracketed", best, optimum, low, high, curvature * math.log(2) ** 2)
    return found if degrees else replace(found, low=None, high=None)


class Line:
    """The runs of one key: losses by value and seed. A failed seed makes a mean infinite. best: None if all failed."""

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

    def worse(self, sigma: float) -> tuple[list[Any], list[Any]]:
        """The values below and above the best value, worse by more than sigma."""
        return self._sides([value for value in self.values if self._gap(value) > sigma])

    def tried_and_left(self, sigma: float) -> tuple[list[Any], list[Any]]:
        """The values below and above the best value that a descent tried and left: with all seeds of the best one, or
        over the shared seeds at most better by sigma."""
        n = self.count(self.best)
        return self._sides([x for x in self.values if self.count(x) >= n or self._paired_gap(x) >= -sigma])

    def gain_over(self, value: Any) -> tuple[float, int]:
        """The gain of the best value over another, and the number of their shared seeds, at least 1."""
        return self._paired_gap(value), max(1, len(self._runs[value].keys() & self._runs[self.best].keys()))

    def _sides(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        return [value for value in values if value < self.best], [value for value in values if value > self.best]

    def _gap(self, value: Any) -> float:
        """The loss of a value less the best's: by means, or over shared seeds, the smaller of the two. Most values have
        the first seed alone: if it is hard, means alone would call them bad. Shared seeds alone trust the luck of the
        best."""
        return min(self.mean(value) - self.mean(self.best), self._paired_gap(value))

    def _paired_gap(self, value: Any) -> float:
        """Over shared seeds, or by means without one."""
        of_best = self._runs[self.best]
        pairs = [loss - of_best[seed] for seed, loss in self._runs[value].items() if seed in of_best]
        return statistics.fmean(pairs) if pairs else self.mean(value) - self.mean(self.best)


def vertex_of(line: Line, left: Any, right: Any, noise: float) -> tuple[float, float, float, float] | None:
    """Optimum, both ends of its interval, and c; None without a parabola.

    Weighted least squares of a + b x + c x², x = ln(value / best), through the values from `left` to `right`. Where
    this parabola misses a mean loss by more than that mean's noise, or has no lowest point between `left` and `right`,
    another goes through the best and its neighbours alone. The interval is every x whose slope b + 2 c x does not
    differ from 0 (Fieller's theorem). noise: half the width of the interval of one loss.
    """
    best = line.best
    inside = [value for value in line.values if left <= value <= right]
    nearest = [max(v for v in inside if v < best), best, min(v for v in inside if v > best)]
    ends = math.log(left / best), math.log(right / best)
    found = None
    for window in (inside, nearest):  # an odd one among many values may bend the parabola; three cannot be bent
        means = np.array([line.mean(value) for value in window])
        if not np.isfinite(means).all():
            continue
        x = np.array([math.log(value / best) for value in window])
        design = np.stack([np.ones_like(x), x, x**2], axis=1)  # (n, 3)
        weights = np.array([line.count(value) for value in window], dtype=float)
        inverse = np.linalg.inv(design.T @ (weights[:, None] * design))  # (3, 3)
        fitted = inverse @ (design.T @ (weights * means))
        _, b, c = fitted
        if c <= 0 or not ends[0] < -b / (2 * c) < ends[1]:
            continue
        # (b + 2 c x)² <= noise² var(b + 2 c x): a quadratic p x² + 2 q x + r <= 0.
        cov = (CHOSEN * noise) ** 2 * inverse
        p, q, r = 4 * (c**2 - cov[2, 2]), 2 * (b * c - cov[1, 2]), b**2 - cov[1, 1]
        positive = [value for value in line.values if 0 < value < math.inf]
        low, high = math.log(positive[0] / best), math.log(positive[-1] / best)
        if p > 0:  # else the curvature is not resolved
            half = math.sqrt(max(q**2 - p * r, 0.0))
            low, high = max(low, (-q - half) / p), min(high, (-q + half) / p)
        optimum, low, high = (float(best * math.exp(at)) for at in (-b / (2 * c), low, high))
        found = optimum, min(low, optimum), max(high, optimum), float(c)
        misses = np.sqrt(weights) * np.abs(design @ fitted - means)
        if len(window) == len(fitted) or not 0 < noise < misses.max():
            return found
    return found  # a parabola that misses a loss, where the nearest values have none


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
