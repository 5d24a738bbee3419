"""The end losses of an arm and the baseline, and the noise of numbers that come from them.

Both arms have the same seeds and validation rows. D[s, r] is the arm's loss less the baseline's loss at seed s and row
r. Seeds and rows are crossed random factors (docs/study.md, "Intervals"):

    D[s, r] = difference + seed[s] + row[r] + rest[s, r]
    Var(mean of D) = Var(seed) / S + Var(row) / R + Var(rest) / (S R)

The first and the last part come from the variance between the means of seeds at this budget, with S - 1 degrees of
freedom, 2 for three seeds. The other budgets add less than one, because noise may change over budgets (`by_budget`).
The second part comes from the variance between rows, less the rest. The interval is Student's with the two quantiles
weighted by their variances (Cochran and Cox), for a sum of two variances with different degrees of freedom.

A loss at the best value tried lies above the loss at the optimum. This price moves one end of an interval (`Price`).
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc, stdtrit


@dataclass(frozen=True)
class Further:
    """End losses of the baseline at budgets which the arm lacks; NaN for a missing seed."""

    budgets: np.ndarray  # (M,) tokens
    losses: np.ndarray  # (M, T) nats, of any seeds
    rows: np.ndarray | None = None  # (M, T, R), as in Pair
    prices: np.ndarray | None = None  # (M, 2), as in Pair

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
    # Of baseline and arm: how much lower the loss is at the optimum, and how much more that may be. None: not at all.
    prices: np.ndarray | None = None  # (K, 2, 2) nats
    unstable: np.ndarray | None = None  # (K, 2, 2) the same, of values at which a seed diverges

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


def by_budget(squares: np.ndarray, df: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variances at each budget, and their degrees of freedom.

    squares: (K,) sums of squares; df: (K,) their degrees of freedom. The variance over the other budgets counts with p
    degrees of freedom, p the probability of variances so unlike if all were equal (Bartlett's test). So variances that
    look alike by chance, as of three seeds, count as less than the budget's own.
    """
    own, several = squares / np.maximum(df, 1e-9), df > 0
    p, n = 1.0, int(several.sum())
    if n > 1 and squares.any():
        with np.errstate(divide="ignore"):
            apart = df.sum() * np.log(squares.sum() / df.sum()) - np.sum(df[several] * np.log(own[several]))
        p = float(chdtrc(n - 1, apart / (1 + (np.sum(1 / df[several]) - 1 / df.sum()) / (3 * (n - 1)))))
    others = df.sum() - df
    elsewhere = (squares.sum() - squares) / np.maximum(others, 1e-9)
    extra = np.where(others > 0, p, 0.0)
    # A budget with one run knows nothing itself.
    total = np.where(several, df + extra, others)
    return np.where(several, (squares + extra * elsewhere) / np.maximum(total, 1e-9), elsewhere), total


class Noise:
    """The noise of estimates sum_k u[k, 0] baseline[k] + u[k, 1] difference[k] over K + M budgets.

    baseline and difference are means over the seeds. u[:, 0] has the sum 0, so a shift of all budgets by a seed
    cancels. The K shared budgets come first, then the M further budgets of the baseline; u may end before them.
    """

    def __init__(self, pair: Pair) -> None:
        """The noise of baseline and difference changes over budgets by the same factor."""
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
        # (2, 2), between seeds, of all budgets
        self.seeds = np.full((2, 2), np.nan) if self.difference_df == 0 else (both @ both.T) / np.maximum(df, 1)
        squares, counts, whole = np.nansum(difference**2, axis=1), pair.n_seeds - 1.0, self.seeds[1, 1]
        if whole <= 1e-12 * self.seeds[0, 0]:  # the arms share all noise but rounding, which tells nothing
            squares, whole = counts, np.float64(1.0)
        if further is not None:
            rest = np.nansum((further.losses - np.nanmean(further.losses, axis=1, keepdims=True)) ** 2, axis=1)
            squares = np.concatenate([squares, whole * _share(rest, self.seeds[0, 0])])
            counts = np.concatenate([counts, further.counts - 1.0])
        variances, self.df = by_budget(squares, counts)
        self.factors = _share(variances, whole)  # (K + M,) of self.seeds, by budget
        # (K + M, 2, K + M, 2), over rows, of means over seeds; without the rest of seed and row
        self.rows = None
        if pair.baseline_rows is not None and pair.arm_rows is not None and pair.n_rows > 1:
            baseline_rows, difference_rows = pair.baseline_rows, pair.arm_rows - pair.baseline_rows
            if further is not None and further.rows is not None:
                baseline_rows = _stacked(baseline_rows, further.rows)
                difference_rows = _stacked(difference_rows, 0 * further.rows)
            self.rows = _over_rows(baseline_rows, difference_rows)
        known = [x for x in (pair.prices, pair.unstable) if x is not None]
        self.prices = np.zeros((len(self.n_seeds), 2, 2))  # as in Pair, together
        self.prices[:n_budgets, :, 0] = sum(x[:, :, 0] for x in known)
        self.prices[:n_budgets, :, 1] = np.sqrt(sum(x[:, :, 1] ** 2 for x in known))
        if further is not None and further.prices is not None:
            self.prices[n_budgets:, 0] = further.prices

    def spread(self, u: np.ndarray) -> Spread:
        """The spread of n estimates; u: (n, K, 2) or (n, K + M, 2)."""
        u = self._padded(u)
        of_budgets = np.sum((u @ self.seeds) * u, axis=2) * self.factors / self.n_seeds
        seeds = of_budgets.sum(axis=1)
        # A difference at single seeds stays unknown in spite of other budgets' noise.
        of_difference = u[:, :, 1] != 0
        involved = np.where(of_difference.any(axis=1, keepdims=True), of_difference, u[:, :, 0] != 0)
        seeds = np.where(involved.any(axis=1) & ~(involved & (self.n_seeds > 1)).any(axis=1), np.nan, seeds)
        with np.errstate(divide="ignore", invalid="ignore"):
            df = seeds**2 / np.sum(of_budgets**2 / np.maximum(self.df, 1e-9), axis=1)  # Satterthwaite
        seeds_df = np.clip(np.nan_to_num(df, nan=1.0), None, max(self.difference_df, 1))
        rows = np.full(len(u), np.nan)
        if self.rows is not None:
            flat = u.reshape(len(u), -1)
            rows = np.maximum(np.sum((flat @ self.rows.reshape(flat.shape[1], -1)) * flat, axis=1), 0) / self.n_rows
        return Spread(np.maximum(seeds, 0), seeds_df, rows, self.n_rows - 1)

    def ends(self, u: np.ndarray, confidence: float) -> np.ndarray:
        """(2, n): how far the intervals of n estimates reach below and above them; u as in `spread`. A price is known
        to be 0 at least. Its estimate moves one end; what it may be beyond adds to the noise."""
        u = self._padded(u)
        half = self.spread(u).half_width(confidence)
        shifts = np.stack([u[:, :, 1] - u[:, :, 0], -u[:, :, 1]], axis=2)  # (n, K + M, 2), of an estimate by the prices
        moved = np.maximum(np.stack([-shifts, shifts]), 0)  # (2, n, K + M, 2)
        estimate = np.sum(moved * self.prices[:, :, 0], axis=(2, 3))
        return np.asarray(estimate + np.sqrt(half**2 + np.sum((moved * self.prices[:, :, 1]) ** 2, axis=(2, 3))))

    def _padded(self, u: np.ndarray) -> np.ndarray:
        return np.pad(u, ((0, 0), (0, len(self.n_seeds) - u.shape[1]), (0, 0)))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; 1 where that is not known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.asarray(part / whole)
    return np.where(np.isfinite(found), found, 1.0)


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
