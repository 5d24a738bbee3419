"""What it would take to resolve a difference: seeds, validation rows or steps, from the noise that was found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import nctdtr

from ngpt_train.study.compare.statistics.intervals import Difference, Pair, Spread, t_quantile

POWER = 0.8  # chance that an interval excludes 0 where the difference is as large as it was found
MOST = {"seeds": 10_000, "rows": 100_000_000}  # more than that is no answer
FURTHER = 8.0  # times the tokens of the largest budget up to which the trend of the difference is followed


def needed(pair: Pair, found: Difference, at: int, steps: int, confidence: float) -> dict[str, int | None]:
    """How many seeds, rows or steps would each alone resolve a difference of the size found at budget `at`, with the
    chance POWER. None: none of a reasonable number, or the noise is not known.

    steps: of the runs at this budget. More of them help where the difference grows with the budget.
    """
    if found.n_seeds < 2 or found.estimate == 0:
        return {"seeds": None, "rows": None, "steps": None}
    size, spread = abs(found.estimate), found.spread
    budgets = int(np.sum(pair.n_seeds > 1))

    def with_seeds(n: int) -> Spread:
        more = spread.seeds * found.n_seeds / n
        return Spread(more, np.full(1, budgets * (n - 1.0)), spread.rows, spread.rows_df)

    def with_rows(n: int) -> Spread:
        return Spread(spread.seeds, spread.seeds_df, spread.rows * found.n_rows / n, n - 1.0)

    rows = None if found.n_rows < 2 else _fewest(with_rows, size, confidence, 2, MOST["rows"])
    seeds = _fewest(with_seeds, size, confidence, 2, MOST["seeds"])
    return {"seeds": seeds, "rows": rows, "steps": _steps(pair, found, at, steps, confidence)}


def chance(spread: Spread, size: float, confidence: float) -> float:
    """That the interval of a difference of this size excludes 0 on the right side."""
    error, df = float(spread.error[0]), float(spread.df[0])
    if error == 0:
        return 1.0
    return float(1 - nctdtr(df, size / error, spread.half_width(confidence)[0] / error))


def detectable(spread: Spread, confidence: float) -> float:
    """The smallest difference that this noise would let be resolved with the chance POWER."""
    about = float((spread.half_width(confidence) + t_quantile(2 * POWER - 1, spread.df) * spread.error)[0])
    if about == 0:
        return 0.0
    return float(brentq(lambda size: chance(spread, size, confidence) - POWER, 0.0, 3 * about))


def _fewest(spread_of: Callable[[int], Spread], size: float, confidence: float, least: int, most: int) -> int | None:
    if chance(spread_of(most), size, confidence) < POWER:
        return None
    low, high = least - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chance(spread_of(middle), size, confidence) >= POWER else (middle, high)
    return high


def _steps(pair: Pair, found: Difference, at: int, steps: int, confidence: float) -> int | None:
    """Where the line of the difference over log budget grows to what the noise lets be seen. None also where its slope
    does not differ from 0 by more than the noise between seeds: then nobody knows that more steps help."""
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
