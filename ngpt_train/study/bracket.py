"""The tuning of one key: its best value, worse values on both sides, and the parabola through them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

# Widens the noise. The losses decided which values were tried and when the search ended. If the values of a seed share
# no noise, intervals from sigma itself would hold the optimum in 90 of 100 searches instead of 95.
CHOSEN = 1.15


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
    values: Sequence[Any],
    losses: Sequence[float | None],
    sigma: float,
    *,
    seeds: Sequence[int] | None = None,
    complete: bool = False,
    listed: bool = False,
    confidence: float = 0.95,
    degrees: float = math.inf,
) -> Tuning:
    """Judges the runs of one key, given by value, end loss and seed. A failed run has the loss None, worse than any.

    sigma: standard deviation of the end loss between seeds, with `degrees` degrees of freedom. With 0, as for one seed,
    the interval is unknown. A value is worse than the best if its mean loss is higher by more than sigma, with `seeds`
    also over the shared seeds. complete: only values with the most seeds can be the best. listed: no other values are
    allowed, so the best only has to lie inside.
    """
    line = Line(values, losses, seeds, complete)
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
    """The runs of one key by its value. A value with a failed seed has an infinite mean."""

    def __init__(
        self,
        values: Sequence[Any],
        losses: Sequence[float | None],
        seeds: Sequence[int] | None = None,
        complete: bool = False,
    ) -> None:
        self._runs: dict[Any, list[tuple[int | None, float]]] = {}
        known: Sequence[int | None] = [None] * len(losses) if seeds is None else seeds
        for value, loss, seed in zip(values, losses, known, strict=True):
            finite = math.inf if loss is None or not math.isfinite(loss) else float(loss)
            self._runs.setdefault(value, []).append((seed, finite))
        is_ordered = all(is_number(value) for value in self._runs)
        self.values = sorted(self._runs) if is_ordered else list(self._runs)
        finite_values = [value for value in self.values if math.isfinite(self.mean(value))]
        most = max(map(self.count, finite_values), default=0)
        allowed = [value for value in finite_values if not complete or self.count(value) == most]
        self.best: Any = min(allowed, key=lambda value: (self.mean(value), -self.count(value)), default=None)

    def mean(self, value: Any) -> float:
        return statistics.fmean(loss for _, loss in self._runs[value])

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
        of_best = {seed: loss for seed, loss in self._runs[self.best] if seed is not None}
        pairs = [loss - of_best[seed] for seed, loss in self._runs[value] if seed in of_best]
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
