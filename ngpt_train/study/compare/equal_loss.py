"""The tokens that the baseline needs for an arm's end loss, as a ratio, and its trend over the budgets.

Annealed, between runs that each end their own schedule. The fit of the baseline's end loss over its budget is a power
law with a floor,

    loss(x) = a - b (1 - exp(-c u)) / c,   u = log(x / x_0),   b >= 0.

It is monotone, and a line in log x for c -> 0. The ratio r at budget x solves

    loss(r x) - loss(x) = arm's end loss - baseline's end loss at x.

The right side is the paired difference: shared noise cancels, and identical runs give 1. The interval is every r that
the noise does not exclude.

Within one schedule, a frequent claim: the step at which the better arm reaches the other's end loss. It flatters the
arm whose learning rate decays faster. It stands beside the annealed ratio, never instead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq, minimize_scalar
from scipy.special import fdtrc

from ngpt_train.study.compare.intervals import Noise, Pair, t_quantile

BEYOND = 2.0  # factor beyond the baseline's budgets up to which the fit is extrapolated
EXTRAPOLATED = f"beyond the budgets of the baseline's fit, which is extrapolated by a factor of {BEYOND:g} at most"
BENDS = (-1.5, 3.0)  # limits of c
STEPS = 200  # of the search over ratios
SMALL = 1e-4  # step in log tokens of a numerical derivative
FLATTERS = "within one schedule, which flatters the arm whose learning rate decays faster"

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EndLosses:
    """The fit of the baseline's end loss over its K >= 2 budgets."""

    tokens: np.ndarray  # (K,) ascending
    losses: np.ndarray  # (K,) nats
    counts: np.ndarray  # (K,) runs behind each loss

    @cached_property
    def u(self) -> np.ndarray:
        return self._log(self.tokens)

    def _log(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(tokens)) - float(np.mean(np.log(self.tokens)))

    @cached_property
    def bend(self) -> float:
        """c; 0 for two budgets."""
        if not self.may_bend:
            return 0.0
        grid = np.linspace(*BENDS, 31)
        best = int(np.argmin([self._misfit(c) for c in grid]))
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        found = minimize_scalar(self._misfit, bounds=around, method="bounded", options={"xatol": 1e-9})
        return float(found.x)

    def _misfit(self, c: float) -> float:
        design, weight = self._design(c), np.sqrt(self.counts)
        solution = np.linalg.lstsq(weight[:, None] * design, weight * self.losses, rcond=None)[0]
        return float(np.sum(self.counts * (self.losses - design @ solution) ** 2))

    def _design(self, c: float) -> np.ndarray:
        return np.stack([np.ones_like(self.u), -bent(self.u, c)], axis=1)

    @cached_property
    def coefficients(self) -> np.ndarray:
        """(a, b); b is 0 if the losses do not fall."""
        weight = np.sqrt(self.counts)
        a, b = np.linalg.lstsq(weight[:, None] * self._design(self.bend), weight * self.losses, rcond=None)[0]
        return np.array([a, b]) if b > 0 else np.array([np.average(self.losses, weights=self.counts), 0.0])

    @property
    def may_bend(self) -> bool:
        return len(self.tokens) > 2

    @property
    def residuals(self) -> np.ndarray:
        return np.asarray(self.losses - self.at(self.tokens))

    def is_off(self, noise: Noise, confidence: float) -> bool:
        """True if the losses lie off the fit by more than the noise between seeds, by an F test. False for three
        budgets, which the three coefficients fit exactly."""
        df = len(self.tokens) - 3
        if df < 1 or noise.baseline_df < 1 or noise.seeds[0, 0] == 0:
            return False
        misfit = np.sum(self.counts * self.residuals**2) / df / noise.seeds[0, 0]
        return bool(fdtrc(df, noise.baseline_df, misfit) < 1 - confidence)

    @property
    def falls(self) -> bool:
        return bool(self.coefficients[1] > 0)

    def at(self, tokens: np.ndarray) -> np.ndarray:
        """The fitted loss."""
        a, b = self.coefficients
        return np.asarray(a - b * bent(self._log(tokens), self.bend))

    def weights(self, tokens: np.ndarray) -> np.ndarray:
        """(n, K) derivatives of the fitted loss at n tokens by `losses`."""
        return np.asarray(self._slopes(self._log(tokens)) @ self._response)

    @cached_property
    def _response(self) -> np.ndarray:
        """(3, K) derivatives of the coefficients by the losses."""
        here = self._slopes(self.u)
        return np.asarray(np.linalg.pinv(here.T @ (self.counts[:, None] * here)) @ (here.T * self.counts))

    def _slopes(self, u: np.ndarray) -> np.ndarray:
        """Derivatives of the fit by a, b and, if it is free, c."""
        b, c, small = self.coefficients[1], self.bend, 1e-5
        columns = [np.ones_like(u), -bent(u, c)]
        if self.may_bend and BENDS[0] + 1e-6 < c < BENDS[1] - 1e-6:
            columns.append(-b * (bent(u, c + small) - bent(u, c - small)) / (2 * small))
        return np.stack(columns, axis=1)


def bent(u: np.ndarray, c: float) -> np.ndarray:
    """(1 - exp(-c u)) / c; u for c = 0."""
    return u if abs(c) < 1e-7 else -np.expm1(-c * u) / c


@dataclass(frozen=True)
class Ratio:
    """The baseline's tokens over the arm's tokens for the same loss. None: unknown, or an open end of the interval."""

    estimate: float | None
    low: float | None
    high: float | None
    extrapolated: bool = False
    note: str | None = None


def annealed_ratio(pair: Pair, noise: Noise, at: int, confidence: float) -> Ratio:
    """The ratio for the arm's end loss at budget number `at`. noise: `Noise(pair)`."""
    if len(pair.budgets) + (0 if pair.further is None else len(pair.further.budgets)) < 2:
        return Ratio(None, None, None, note="one budget: what the baseline gains from more tokens is not known")
    curve, place = end_losses(pair)
    if not curve.falls:
        return Ratio(None, None, None, note="the baseline's end loss does not fall with its budget")
    here = pair.budgets[at]
    difference = float(np.nanmean(pair.difference[at]))
    weights_here = curve.weights(here[None])[:, place]

    def gap(log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The baseline's loss at exp(log) times the tokens less the arm's end loss; half the width of its interval."""
        u = np.zeros((len(log), len(place), 2))
        u[:, :, 0] = np.where(log[:, None] == 0, 0.0, curve.weights(here * np.exp(log))[:, place] - weights_here)
        u[:, at, 1] = -1
        return curve.at(here * np.exp(log)) - curve.at(here) - difference, noise.spread(u).half_width(confidence)

    first, last = np.log(curve.tokens[[0, -1]] / here)
    logs = np.union1d(np.linspace(first - np.log(BEYOND), last + np.log(BEYOND), STEPS), [0.0])
    found = gap(logs)
    estimate, low, high = (_last_above(gap, logs, found, side) for side in (0, -1, 1))
    ends = [x for x in (low, high) if x is not None]
    is_noise_known = bool(np.isfinite(found[1]).all())
    beyond = (is_noise_known and len(ends) < 2) or estimate is None
    extrapolated = beyond or not all(first - 1e-9 <= x <= last + 1e-9 for x in [*ends, estimate])
    notes = [] if curve.may_bend else ["the fit is a line through two budgets, and the interval lacks its error"]
    if curve.is_off(noise, confidence):
        off = np.max(np.abs(curve.residuals))
        notes += [f"the baseline lies up to {off:.2g} off the fit, more than its noise, and the interval lacks this"]
    if extrapolated:
        notes.append(EXTRAPOLATED)
    return Ratio(_ratio(estimate), _ratio(low), _ratio(high), extrapolated, "; ".join(notes) or None)


def end_losses(pair: Pair) -> tuple[EndLosses, np.ndarray]:
    """The fit through the baseline's paired runs and its further budgets; and the place of each budget on the curve,
    `(K + M,)`, further ones last."""
    losses = np.nanmean(np.where(np.isnan(pair.difference), np.nan, pair.baseline), axis=1)
    budgets, counts = pair.budgets, pair.n_seeds
    if (more := pair.further) is not None:
        losses = np.concatenate([losses, np.nanmean(more.losses, axis=1)])
        budgets, counts = np.concatenate([budgets, more.budgets]), np.concatenate([counts, more.counts])
    order = np.argsort(budgets)
    return EndLosses(budgets[order], losses[order], counts[order]), np.argsort(order)


def _ratio(log: float | None) -> float | None:
    return None if log is None else float(np.exp(log))


Gap = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _last_above(gap: Gap, logs: np.ndarray, found: tuple[np.ndarray, np.ndarray], side: int) -> float | None:
    """The log ratio at which gap + side * half falls below 0; None if it is outside of `logs`.

    side: 0 for the estimate, -1 and 1 for the lower and upper end. With several such places the lower end is the first
    and the upper end the last, so the interval has every ratio that the noise allows. found: gap(logs).
    """

    def value(middle: np.ndarray, half: np.ndarray) -> np.ndarray:
        return middle + side * half if side else middle

    values = value(*found)
    above = values >= 0
    if not np.isfinite(values).all() or above.all() or not above.any():
        return None
    left = int(np.flatnonzero(above)[-1]) if side > 0 else int(np.flatnonzero(~above)[0]) - 1
    if not 0 <= left < len(logs) - 1:
        return None
    return float(brentq(lambda x: float(value(*gap(np.array([x])))[0]), logs[left], logs[left + 1], xtol=1e-10))


@dataclass(frozen=True)
class Trend:
    """The factor of the speed-up when the budget doubles."""

    estimate: float
    low: float | None
    high: float | None
    budgets: tuple[int, ...]  # tokens, with known speed-ups
    extrapolated: bool  # True if a speed-up lies beyond the baseline's budgets


def trend_of(pair: Pair, noise: Noise, ratios: Sequence[Ratio], confidence: float) -> Trend | None:
    """The slope of log ratio over log budget; None for fewer than two ratios. None also for a fit through two budgets:
    it is a line, and its missing bend would look like growth.

    ratios: `annealed_ratio` by budget, without an estimate for budgets that do not count. noise: `Noise(pair)`. The
    ratio r at budget x solves loss(r x) - loss(x) = difference. To first order, with loss' by log tokens,

        loss'(r x) d log r = d difference - (d loss(r x) - d loss(x)).

    So the slope, a weighted sum of log r, is a weighted sum of end losses, and `noise` gives its interval. The ratios'
    own intervals would not do, because the ratios share the fit and the baseline's runs.
    """
    known = [k for k, ratio in enumerate(ratios) if ratio.estimate is not None]
    curve, place = end_losses(pair)
    if len(known) < 2 or not curve.may_bend:
        return None
    log_r = np.log([float(ratios[k].estimate or 1) for k in known])  # (n,)
    here = pair.budgets[known]  # (n,)
    there = here * np.exp(log_r)
    u = np.zeros((len(known), len(place), 2))  # (n, K + M, 2) derivatives of log r by the end losses
    u[:, :, 0] = -(curve.weights(there) - curve.weights(here))[:, place]
    u[np.arange(len(known)), known, 1] = 1
    u /= _slope(curve, there)[:, None, None]

    variance = noise.spread(u).error ** 2
    weights = 1 / variance if np.all(variance > 0) else np.ones(len(known))  # unknown noise, or none
    x = np.log(here) - np.average(np.log(here), weights=weights)
    share = weights * x / np.sum(weights * x**2)  # (n,) weight of each log r in the slope
    slope = float(share @ log_r)
    half = float(noise.spread(np.einsum("n,nki->ki", share, u)[None]).half_width(confidence)[0])
    low, high = (_factor(slope - half), _factor(slope + half)) if np.isfinite(half) else (None, None)
    extrapolated = any(ratios[k].extrapolated for k in known)
    return Trend(_factor(slope), low, high, tuple(int(x) for x in here), extrapolated)


def _factor(slope: float) -> float:
    return float(np.exp(slope * np.log(2)))


def _slope(curve: EndLosses, tokens: np.ndarray) -> np.ndarray:
    """(n,) derivative of the fitted loss by log tokens; below 0."""
    above, below = curve.at(tokens * np.exp(SMALL)), curve.at(tokens * np.exp(-SMALL))
    return np.asarray((above - below) / (2 * SMALL))


def within_schedule(logs: Mapping[int, Sequence[float]], confidence: float) -> dict[int, Ratio]:
    """The ratio within one schedule by budget.

    logs[budget]: `log_ratio` of each seed. Their variance between seeds is pooled over budgets.
    """
    values = {budget: np.array(of_budget) for budget, of_budget in logs.items()}
    df = sum(len(x) - 1 for x in values.values())
    variance = sum(float(np.sum((x - x.mean()) ** 2)) for x in values.values()) / max(df, 1)
    ratios = {}
    for budget, x in values.items():
        estimate = float(np.exp(x.mean()))
        if len(x) < 2:
            ratios[budget] = Ratio(estimate, None, None, note=f"{FLATTERS}; one seed")
            continue
        factor = float(np.exp(t_quantile(confidence, df) * np.sqrt(variance / len(x))))
        ratios[budget] = Ratio(estimate, estimate / factor, estimate * factor, note=FLATTERS)
    return ratios


def log_ratio(arm: Records, baseline: Records, metric: str) -> float | None:
    """log(tokens of the baseline / tokens of the arm) at equal loss, by the eval records of two runs. It is positive if
    the arm ends lower, and so reaches the baseline's end loss earlier. None without a validation before that loss."""
    (tokens, losses), (of_baseline, baseline_losses) = (curve(records, metric) for records in (arm, baseline))
    if min(len(tokens), len(of_baseline)) < 2:
        return None
    if losses[-1] <= baseline_losses[-1]:
        there = reached(tokens, losses, baseline_losses[-1])
        return None if there is None else float(np.log(of_baseline[-1] / there))
    there = reached(of_baseline, baseline_losses, losses[-1])
    return None if there is None else float(np.log(there / tokens[-1]))


def curve(records: Records, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and the lowest loss so far, `(n,)` each, of the validations after step 0."""
    known: dict[float, float] = {
        x["tokens"]: x[metric] for x in records if x.get("tokens") and x.get(metric) is not None
    }
    tokens = np.array(sorted(known), dtype=float)
    return tokens, np.minimum.accumulate(np.array([known[t] for t in tokens], dtype=float))


def reached(tokens: np.ndarray, losses: np.ndarray, loss: float) -> float | None:
    """The tokens at which a falling curve reaches `loss`, by a monotone cubic in log tokens. None if it never does, or
    at its first point."""
    below = np.flatnonzero(losses <= loss)
    if len(below) == 0 or below[0] == 0:
        return None
    if losses[below[0]] == loss:
        return float(tokens[below[0]])
    first, last = np.log(tokens[below[0] - 1 : below[0] + 1])
    smooth = PchipInterpolator(np.log(tokens), losses)
    return float(np.exp(brentq(lambda x: float(smooth(x)) - loss, float(first), float(last), xtol=1e-12)))
