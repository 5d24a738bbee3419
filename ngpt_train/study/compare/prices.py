"""By how much an arm's loss at its compared values may lie above its loss at the best ones: between the rates tried,
and where a seed diverges."""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ngpt_train.study.compare.noise import t_quantile
from ngpt_train.study.tuning import Trials, Tuning, Values, line_of, noise_between_seeds

NO_PRICE = (0.0, 0.0)


def price_of_grid(
    trials: Trials, tunings: Mapping[str, Tuning], best: Values, listed: Collection[str]
) -> tuple[float, float]:
    """The estimate for an arm at a budget, and how much more it may be, in nats, by the parabolas of its keys.

    tunings: by key. A key's optimum lies in its interval, and nearer to the best value than to the values tried beside
    it: else one of these would be the best. Keys without a parabola, and listed ones, have the price 0.
    """
    found = [NO_PRICE]
    for key, tuning in tunings.items():
        price, of_two, value = tuning.price_of_grid, tuning.price_of_two, tuning.best
        if key not in listed and price is not None and of_two is not None:
            tried = line_of(trials, key, best).values
            low = max(tuning.low or 0.0, math.sqrt(value * max(x for x in tried if x < value)))
            high = min(tuning.high or math.inf, math.sqrt(value * min(x for x in tried if x > value)))
            most = of_two * max(math.log2(value / low), math.log2(high / value), 0.0) ** 2
            found.append((min(price, most), max(most - price, 0.0)))
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
