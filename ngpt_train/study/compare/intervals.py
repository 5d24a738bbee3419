"""The interval of a difference between two arms, and the seeds, validation rows or steps that would resolve one."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import nctdtr

from ngpt_train.study.compare.noise import Noise, Pair, Spread, t_quantile

POWER = 0.8  # probability that the interval excludes 0, if the true difference is the found one
MOST = {"seeds": 10_000, "rows": 100_000_000}  # a larger number is no answer
FURTHER = 8.0  # times the tokens of the largest budget, up to where the trend of the difference is followed


@dataclass(frozen=True)
class Difference:
    """An arm's loss less the baseline's at one budget, in nats, with its interval. None: unknown."""

    estimate: float
    low: float | None
    high: float | None
    spread: Spread
    n_seeds: int
    n_rows: int

    @property
    def is_resolved(self) -> bool:
        """True if the interval excludes 0. One seed resolves nothing, because its noise is unknown."""
        return self.n_seeds > 1 and self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def difference_at(pair: Pair, noise: Noise, at: int, confidence: float) -> Difference:
    """The difference at budget number `at`. noise: `Noise(pair)`."""
    u = np.zeros((1, len(pair.budgets), 2))
    u[0, at, 1] = 1
    spread = noise.spread(u)
    estimate = float(np.nanmean(pair.difference[at]))
    below, above = map(float, noise.ends(u, confidence)[:, 0])
    low, high = (estimate - below, estimate + above) if np.isfinite(below) else (None, None)
    return Difference(estimate, low, high, spread, int(pair.n_seeds[at]), pair.n_rows)


def needed(pair: Pair, found: Difference, at: int, steps: int, confidence: float) -> dict[str, int | None]:
    """The number of seeds, rows or steps that each alone would resolve the difference found at budget `at`, with the
    probability POWER. None: no reasonable number, or unknown noise. steps: of the runs at this budget; more help if the
    difference grows with the budget."""
    spread, to_zero = found.spread, found.high if found.estimate < 0 else found.low
    price = 0.0 if to_zero is None else abs(found.estimate - to_zero) - float(spread.half_width(confidence)[0])
    size = abs(found.estimate) - price  # what the price of the grid takes away, no seeds and rows give back
    if found.n_seeds < 2 or size <= 0:
        return {"seeds": None, "rows": None, "steps": None}

    def with_seeds(n: int) -> Spread:
        more = spread.seeds * found.n_seeds / n
        return Spread(more, spread.seeds_df * (n - 1) / (found.n_seeds - 1), spread.rows, spread.rows_df)

    def with_rows(n: int) -> Spread:
        return Spread(spread.seeds, spread.seeds_df, spread.rows * found.n_rows / n, n - 1.0)

    rows = None if found.n_rows < 2 else _fewest(with_rows, size, confidence, MOST["rows"])
    seeds = _fewest(with_seeds, size, confidence, MOST["seeds"])
    return {"seeds": seeds, "rows": rows, "steps": _steps(pair, found, at, steps, confidence)}


def chance(spread: Spread, size: float, confidence: float) -> float:
    """The probability that the interval of a true difference `size` excludes 0, with the right sign."""
    error, df = float(spread.error[0]), float(spread.df[0])
    if error == 0:
        return 1.0
    return float(1 - nctdtr(df, size / error, spread.half_width(confidence)[0] / error))


def detectable(spread: Spread, confidence: float) -> float:
    """The smallest difference resolved with the probability POWER under this noise."""
    about = float((spread.half_width(confidence) + t_quantile(2 * POWER - 1, spread.df) * spread.error)[0])
    if about == 0:
        return 0.0
    return float(brentq(lambda size: chance(spread, size, confidence) - POWER, 0.0, 3 * about))


def _fewest(spread_of: Callable[[int], Spread], size: float, confidence: float, most: int) -> int | None:
    """The smallest number, 2 or more, with which the chance is POWER; None if it is above `most`."""
    numbers = range(2, most + 1)
    found = bisect_left(numbers, POWER, key=lambda n: chance(spread_of(n), size, confidence))
    return numbers[found] if found < len(numbers) else None


def _steps(pair: Pair, found: Difference, at: int, steps: int, confidence: float) -> int | None:
    """The steps at which the line of the difference over log budget reaches the detectable size. None also if the slope
    does not differ from 0 by more than the noise between seeds."""
    if len(pair.budgets) < 3:
        return None
    logs, differences = np.log(pair.budgets), np.nanmean(pair.difference, axis=1)
    slope, _ = np.polyfit(logs, differences, 1, w=np.sqrt(pair.n_seeds))
    apart = np.sum(pair.n_seeds * (logs - np.average(logs, weights=pair.n_seeds)) ** 2)
    error = np.sqrt(found.spread.seeds[0] * found.n_seeds / apart)
    if slope * found.estimate <= 0 or abs(slope) <= t_quantile(confidence, found.spread.seeds_df[0]) * error:
        return None
    more = (detectable(found.spread, confidence) - abs(found.estimate)) / abs(slope)
    last = logs[-1] + np.log(FURTHER)
    return int(np.ceil(steps * np.exp(max(more, 0)))) if logs[at] + more <= last else None
