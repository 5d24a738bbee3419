"""The interval of a difference between two arms, from the noise of seeds and validation rows.

Both arms have the same seeds and validation rows. D[s, r] is the arm's loss less the baseline's loss at seed s and row
r. Seeds and rows are crossed random factors (docs/study.md, "Intervals"):

    D[s, r] = difference + seed[s] + row[r] + rest[s, r]
    Var(mean of D) = Var(seed) / S + Var(row) / R + Var(rest) / (S R)

The first and the last part come from the variance between the means of seeds. It has S - 1 degrees of freedom, 2 for
three seeds; pooling over budgets adds more, because budgets are separate runs. The second part comes from the variance
between rows, less the rest. The interval is Student's with the two quantiles weighted by their variances (Cochran and
Cox), for a sum of two variances with different degrees of freedom.

The same noise gives the seeds, validation rows or steps that would resolve a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import nctdtr, stdtrit

POWER = 0.8  # probability that the interval excludes 0, if the true difference is the found one
MOST = {"seeds": 10_000, "rows": 100_000_000}  # a larger number is no answer
FURTHER = 8.0  # times the tokens of the largest budget, up to where the trend of the difference is followed


@dataclass(frozen=True)
class Further:
    """End losses of the baseline at budgets which the arm lacks; NaN for a missing seed."""

    budgets: np.ndarray  # (M,) tokens
    losses: np.ndarray  # (M, T) nats, of any seeds
    rows: np.ndarray | None = None  # (M, T, R), as in Pair

    @property
    def counts(self) -> np.ndarray:
        """(M,) runs of each budget."""
        return np.sum(~np.isnan(self.losses), axis=1)


@dataclass(frozen=True)
class Pair:
    """The end losses of an arm and the baseline at their shared budgets; NaN for a missing run."""

    budgets: np.ndarray  # (K,) tokens, ascending
    baseline: np.ndarray  # (K, S) nats
    arm: np.ndarray  # (K, S), the same seeds in the same order
    # The part of each validation row in the run's loss: R (loss_sum - n_targets loss) / all targets. Its mean over rows
    # is 0. None if runs were validated on different rows, or if files are missing.
    baseline_rows: np.ndarray | None = None  # (K, S, R)
    arm_rows: np.ndarray | None = None
    further: Further | None = None  # for the fit of the baseline's loss over its budget

    @property
    def difference(self) -> np.ndarray:
        """(K, S), paired."""
        return self.arm - self.baseline

    @property
    def n_seeds(self) -> np.ndarray:
        """(K,) seeds with a run of both arms, at least one."""
        return np.sum(~np.isnan(self.difference), axis=1)

    @property
    def n_rows(self) -> int:
        return 0 if self.baseline_rows is None else self.baseline_rows.shape[2]


@dataclass(frozen=True)
class Spread:
    """Variances of n estimates from each source of noise, with their degrees of freedom. NaN: unknown."""

    seeds: np.ndarray  # (n,)
    seeds_df: np.ndarray
    rows: np.ndarray
    rows_df: float

    @property
    def error(self) -> np.ndarray:
        """(n,) standard errors; NaN if no noise is known."""
        total = np.nansum([self.seeds, self.rows], axis=0)
        return np.sqrt(np.where(np.isnan(self.seeds) & np.isnan(self.rows), np.nan, total))

    @property
    def df(self) -> np.ndarray:
        """(n,) degrees of freedom of the sum, by Satterthwaite."""
        seeds, rows = np.nan_to_num(self.seeds), np.nan_to_num(self.rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            below = np.nan_to_num(seeds**2 / self.seeds_df) + np.nan_to_num(rows**2 / self.rows_df)
            return np.where(below > 0, (seeds + rows) ** 2 / below, 1.0)

    def half_width(self, confidence: float) -> np.ndarray:
        """(n,) half of the interval's width; infinite if no noise is known.

        Satterthwaite's degrees of freedom suit many runs. With few, a small estimate of the seeds' noise looks like
        many degrees of freedom, and the intervals hold the truth too seldom (docs/study.md)."""
        seeds, rows = np.nan_to_num(self.seeds), np.nan_to_num(self.rows)
        of_seeds, of_rows = t_quantile(confidence, self.seeds_df), t_quantile(confidence, max(self.rows_df, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            quantile = np.nan_to_num((seeds * of_seeds + rows * of_rows) / (seeds + rows))
        return np.nan_to_num(quantile * self.error, nan=np.inf)


def t_quantile(confidence: float, df: np.ndarray | float) -> np.ndarray:
    """Half of a two-sided interval's width, in standard errors."""
    return np.asarray(stdtrit(df, (1 + confidence) / 2))


class Noise:
    """The noise of estimates sum_k u[k, 0] baseline[k] + u[k, 1] difference[k] over K + M budgets.

    baseline and difference are means over the seeds. u[:, 0] has the sum 0, so a shift of all budgets by a seed
    cancels. The K shared budgets come first, then the M further budgets of the baseline; u may end before them.
    """

    def __init__(self, pair: Pair) -> None:
        """Pools the noise between seeds over budgets, as if it were equal and independent."""
        further = pair.further
        self.n_seeds = pair.n_seeds if further is None else np.concatenate([pair.n_seeds, further.counts])
        self.n_rows = pair.n_rows
        has = ~np.isnan(pair.difference)
        n_budgets, n_columns = len(has), int(has.any(axis=0).sum())
        self.difference_df = int(has.sum()) - n_budgets
        self.baseline_df = self.difference_df - (n_columns - 1)
        difference = pair.difference - np.nanmean(pair.difference, axis=1, keepdims=True)
        baseline = _without_seeds(np.where(has, pair.baseline, np.nan))
        both = np.stack([baseline, difference])[:, has]  # (2, runs)
        df = np.array([[self.baseline_df, self.baseline_df], [self.baseline_df, self.difference_df]])
        # (2, 2), between seeds at one budget
        self.seeds = np.full((2, 2), np.nan) if self.difference_df == 0 else (both @ both.T) / np.maximum(df, 1)
        # (K, 2, K, 2), over rows, of means over seeds; without the rest of seed and row
        self.rows = None
        if pair.baseline_rows is not None and pair.arm_rows is not None and pair.n_rows > 1:
            baseline_rows, difference_rows = pair.baseline_rows, pair.arm_rows - pair.baseline_rows
            if further is not None and further.rows is not None:
                baseline_rows = _stacked(baseline_rows, further.rows)
                difference_rows = _stacked(difference_rows, 0 * further.rows)
            self.rows = _over_rows(baseline_rows, difference_rows)

    def spread(self, u: np.ndarray) -> Spread:
        """The spread of n estimates; u: (n, K, 2) or (n, K + M, 2)."""
        u = np.pad(u, ((0, 0), (0, len(self.n_seeds) - u.shape[1]), (0, 0)))
        form = np.einsum("nki,nkj,k->nij", u, u, 1 / self.n_seeds)
        seeds = np.einsum("nij,ij->n", form, self.seeds)
        if (self.n_seeds[np.any(u != 0, axis=(0, 2))] < 2).all():
            seeds = np.full(len(u), np.nan)  # single seeds stay unknown in spite of other budgets' noise
        # The variance of tr(form C), with a covariance C estimated from normal noise, is 2 tr((form C)^2) / df.
        product = form @ np.nan_to_num(self.seeds)
        of_difference = np.einsum("nk,k->n", u[:, :, 1] ** 2, 1 / self.n_seeds) * self.seeds[1, 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.clip(np.abs(seeds - of_difference) / seeds, 0, 1)  # of the baseline's part
            df = 1 / (share / max(self.baseline_df, 1) + (1 - share) / max(self.difference_df, 1))
            seeds_df = df * np.maximum(seeds**2 / np.einsum("nij,nji->n", product, product), 1)
        rows = np.full(len(u), np.nan)
        if self.rows is not None:
            rows = np.maximum(np.einsum("nki,kilj,nlj->n", u, self.rows, u), 0) / self.n_rows
        return Spread(np.maximum(seeds, 0), np.nan_to_num(seeds_df, nan=1.0), rows, self.n_rows - 1)


def _without_seeds(losses: np.ndarray) -> np.ndarray:
    """(K, S) losses less the effects of budgets and seeds, by least squares."""
    has = ~np.isnan(losses)
    budget, seed = np.nonzero(has)
    design = np.concatenate([np.eye(losses.shape[0])[budget], np.eye(losses.shape[1])[seed]], axis=1)
    y = losses[has] - np.mean(losses[has])
    rest = np.full(losses.shape, np.nan)
    rest[has] = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return rest


def _stacked(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(K, S, R) and (M, T, R) as (K + M, max(S, T), R), with NaN for missing seeds."""
    most = max(one.shape[1], other.shape[1])
    wide = [np.pad(x, ((0, 0), (0, most - x.shape[1]), (0, 0)), constant_values=np.nan) for x in (one, other)]
    return np.concatenate(wide)


def _over_rows(baseline: np.ndarray, difference: np.ndarray) -> np.ndarray:
    """(K, 2, K, 2) covariance over rows of (K, S, R) baseline and difference, averaged over seeds. The contribution of
    the rest, which depends on seed and row, is subtracted."""
    both = np.stack([np.where(np.isnan(difference), np.nan, baseline), difference], axis=1)  # (K, 2, S, R)
    means = np.nanmean(both, axis=2)
    df = both.shape[3] - 1
    covariance = np.einsum("kir,ljr->kilj", means, means) / df  # the mean over rows is 0
    for k, budget in enumerate(both):
        seeds = budget[:, ~np.isnan(budget[1, :, 0])]  # (2, S, R)
        if (n := seeds.shape[1]) > 1:  # the rest of a single seed cannot be told from the rows
            rest = seeds - means[k][:, None]
            covariance[k, :, k] -= np.einsum("isr,jsr->ij", rest, rest) / ((n - 1) * df) / n
    return np.asarray(covariance)


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
    half = float(spread.half_width(confidence)[0])
    low, high = (estimate - half, estimate + half) if np.isfinite(half) else (None, None)
    return Difference(estimate, low, high, spread, int(pair.n_seeds[at]), pair.n_rows)


def needed(pair: Pair, found: Difference, at: int, steps: int, confidence: float) -> dict[str, int | None]:
    """The number of seeds, rows or steps that each alone would resolve the difference found at budget `at`, with the
    probability POWER. None: no reasonable number, or unknown noise.

    steps: of the runs at this budget. More steps help if the difference grows with the budget.
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


def _fewest(spread_of: Callable[[int], Spread], size: float, confidence: float, least: int, most: int) -> int | None:
    if chance(spread_of(most), size, confidence) < POWER:
        return None
    low, high = least - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chance(spread_of(middle), size, confidence) >= POWER else (middle, high)
    return high


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
