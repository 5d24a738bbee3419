"""By how much an arm's loss at its compared values may lie above its loss at the best ones: between the rates tried,
and where a seed diverges."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ngpt_train.study.compare.noise import t_quantile
from ngpt_train.study.tuning import Trials, Tuning, Values, is_number, noise_between_seeds

NO_PRICE = (0.0, 0.0)


def price_of_grid(tuning: Tuning, tried: Collection[float]) -> tuple[float, float]:
    """The estimate, and how much more the price may be, in nats, by the parabola of a key.

    The optimum lies in its interval, and nearer to the best value than to the values tried beside it: else one of these
    would be the best. (0, 0) without a parabola.
    """
    best, price = tuning.best, tuning.price_of_grid
    if price is None or tuning.price_of_two is None:
        return NO_PRICE
    left, right = max(v for v in tried if v < best), min(v for v in tried if v > best)
    low = max(tuning.low or 0.0, math.sqrt(left * best))
    high = min(tuning.high or math.inf, math.sqrt(right * best))
    most = tuning.price_of_two * max(math.log2(best / low), math.log2(high / best), 0.0) ** 2
    return min(price, most), max(most - price, 0.0)


def price_of_grids(
    trials: Trials, tunings: Mapping[str, Tuning], best: Values, listed: Collection[str]
) -> tuple[float, float]:
    """Of all keys of an arm at a budget. tunings: by key. Values listed by hand have no others between them."""
    found = []
    for key in [key for key in tunings if key not in listed]:
        others = {k: v for k, v in best if k != key}
        lines = [dict(values) for values in trials]
        tried = {line[key] for line in lines if {k: v for k, v in line.items() if k != key} == others}
        if all(is_number(value) for value in tried):
            found.append(price_of_grid(tunings[key], tried))
    return sum(estimate for estimate, _ in found), math.hypot(*(more for _, more in found))


@dataclass(frozen=True)
class Divergence:
    """Values at which some seeds of an arm diverge and the others end lower than at the compared values."""

    values: Values
    seeds: tuple[int, ...]  # that diverge
    n_seeds: int  # tried
    price: tuple[float, float]  # nats by which the others end lower; how much more that may be


def divergence(trials: Trials, best: Values, confidence: float) -> Divergence | None:
    """The one with the lowest losses; None if there is none. trials: as in a study's tuning, infinite after a
    divergence."""
    found = []
    for values, losses in trials.items():
        seeds = tuple(seed for seed, loss in losses.items() if loss == math.inf)
        gains = [trials[best][s] - loss for s, loss in losses.items() if s in trials[best] and math.isfinite(loss)]
        if seeds and gains and (gain := statistics.fmean(gains)) > 0:
            sigma, df = noise_between_seeds([trials])
            more = float(t_quantile(confidence, df)) * sigma * math.sqrt(2 / len(gains)) if df else 0.0
            found.append(Divergence(values, seeds, len(losses), (gain, more)))
    return max(found, key=lambda x: x.price[0], default=None)
