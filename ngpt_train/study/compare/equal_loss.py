"""The tokens that the baseline needs for an arm's end loss, as a ratio, and its trend over the budgets.

Annealed, between runs that each end their own schedule, by the baseline's end loss over its budget (`end_losses`).
The ratio r at budget x solves

    loss(r x) - loss(x) = arm's end loss - baseline's end loss at x.

The right side is the paired difference: shared noise cancels, and identical runs give 1. The interval is every r that
the noise does not exclude.

Within one schedule, a frequent claim: the step at which the better arm reaches the other's end loss. It flatters the
arm whose learning rate decays faster. It stands beside the annealed ratio, never instead of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from ngpt_train.core.recorded import compared
from ngpt_train.study.compare.end_losses import BEYOND, Between, EndLosses, end_losses
from ngpt_train.study.compare.noise import Noise, Pair, by_budget, t_quantile

EXTRAPOLATED = f"beyond the budgets of the baseline's fit, which is extrapolated by a factor of {BEYOND:g} at most"
STEPS = 200  # of the search over ratios
SMALL = 1e-4  # step in log tokens of a numerical derivative
FLATTERS = "within one schedule, which flatters the arm whose learning rate decays faster"

Records = Sequence[Mapping[str, Any]]


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
    if len(noise.n_seeds) < 2:
        return Ratio(None, None, None, note="one budget: what the baseline gains from more tokens is not known")
    curve, place = end_losses(pair, noise, confidence)
    if not curve.falls:
        return Ratio(None, None, None, note="the baseline's end loss does not fall with its budget")
    here = pair.budgets[at]
    difference = float(np.nanmean(pair.difference[at]))
    weights_here, loss_here = curve.weights(here[None])[:, place], curve.at(here[None])

    def gap(log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The baseline's loss at exp(log) times the tokens less the arm's; how far its interval reaches either way."""
        there, u = here * np.exp(log), np.zeros((len(log), len(place), 2))
        u[:, :, 0] = np.where(log[:, None] == 0, 0.0, curve.weights(there)[:, place] - weights_here)
        u[:, at, 1] = -1
        return curve.at(there) - loss_here - difference, noise.ends(u, confidence) + curve.error(there)

    first, last = np.log(curve.tokens[[0, -1]] / here)
    further = np.log(curve.beyond)
    logs = np.union1d(np.linspace(first - further, last + further, STEPS), [0.0])
    found = gap(logs)
    estimate, low, high = (_last_above(gap, logs, found, side) for side in (0, -1, 1))
    ends = [x for x in (low, high) if x is not None]
    is_noise_known = bool(np.isfinite(found[1]).all())
    beyond = (is_noise_known and len(ends) < 2) or estimate is None
    beyond = beyond or not all(first - 1e-9 <= x <= last + 1e-9 for x in [*ends, estimate])
    extrapolated = beyond and curve.beyond > 1
    note = "; ".join(filter(None, [curve.note, EXTRAPOLATED if extrapolated else None])) or None
    return Ratio(_ratio(estimate), _ratio(low), _ratio(high), extrapolated, note)


def _ratio(log: float | None) -> float | None:
    return None if log is None else float(np.exp(log))


Gap = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def _last_above(gap: Gap, logs: np.ndarray, found: tuple[np.ndarray, np.ndarray], side: int) -> float | None:
    """The log ratio at which the gap, or an end of its interval, falls below 0; None if it is outside of `logs`.

    side: 0 for the estimate, -1 and 1 for the lower and upper end. With several such places the lower end is the first
    and the upper end the last, so the interval has every ratio that the noise allows. found: gap(logs).
    """

    def value(middle: np.ndarray, reach: np.ndarray) -> np.ndarray:
        return middle + side * reach[max(side, 0)] if side else middle

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
    """The slope of log ratio over log budget; None for fewer than two ratios. None also for a fit that misses a bend,
    which would look like growth: a line through two budgets, or one that is not followed beyond the budgets.

    ratios: `annealed_ratio` by budget, without an estimate for budgets that do not count. noise: `Noise(pair)`. The
    ratio r at budget x solves loss(r x) - loss(x) = difference. To first order, with loss' by log tokens,

        loss'(r x) d log r = d difference - (d loss(r x) - d loss(x)).

    So the slope, a weighted sum of log r, is a weighted sum of end losses, and `noise` gives its interval. The ratios'
    own intervals would not do, because the ratios share the fit and the baseline's runs.
    """
    known = [k for k, ratio in enumerate(ratios) if ratio.estimate is not None]
    curve, place = end_losses(pair, noise, confidence)
    if len(known) < 2 or not curve.may_bend or curve.beyond == 1:
        return None
    log_r = np.log([float(ratios[k].estimate or 1) for k in known])  # (n,)
    here = pair.budgets[known]  # (n,)
    there = here * np.exp(log_r)
    u = np.zeros((len(known), len(place), 2))  # (n, K + M, 2) derivatives of log r by the end losses
    u[:, :, 0] = -(curve.weights(there) - curve.weights(here))[:, place]
    u[np.arange(len(known)), known, 1] = 1
    u /= _slope(curve, there)[:, None, None]

    # The larger its slope, the surer is a ratio. Estimates of its noise would prefer budgets that look quiet by luck.
    weights = pair.n_seeds[known] * _slope(curve, there) ** 2
    x = np.log(here) - np.average(np.log(here), weights=weights)
    share = weights * x / np.sum(weights * x**2)  # (n,) weight of each log r in the slope
    slope = float(share @ log_r)
    below, above = map(float, noise.ends(np.einsum("n,nki->ki", share, u)[None], confidence)[:, 0])
    low, high = (_factor(slope - below), _factor(slope + above)) if np.isfinite(below) else (None, None)
    extrapolated = any(ratios[k].extrapolated for k in known)
    return Trend(_factor(slope), low, high, tuple(int(x) for x in here), extrapolated)


def _factor(slope: float) -> float:
    return float(np.exp(slope * np.log(2)))


def _slope(curve: EndLosses | Between, tokens: np.ndarray) -> np.ndarray:
    """(n,) derivative of the fitted loss by log tokens; below 0."""
    above, below = curve.at(tokens * np.exp(SMALL)), curve.at(tokens * np.exp(-SMALL))
    return np.asarray((above - below) / (2 * SMALL))


def within_schedule(logs: Mapping[int, Sequence[float]], confidence: float) -> dict[int, Ratio]:
    """The ratio within one schedule by budget. logs[budget]: `log_ratio` of each seed."""
    values = {budget: np.array(of_budget) for budget, of_budget in logs.items()}
    squares = np.array([np.sum((x - x.mean()) ** 2) for x in values.values()])
    variances, df = by_budget(squares, np.array([len(x) - 1.0 for x in values.values()]))
    ratios = {}
    for k, (budget, x) in enumerate(values.items()):
        estimate = float(np.exp(x.mean()))
        if len(x) < 2:
            ratios[budget] = Ratio(estimate, None, None, note=f"{FLATTERS}; one seed")
            continue
        factor = float(np.exp(t_quantile(confidence, df[k]) * np.sqrt(variances[k] / len(x))))
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
    known = {x["tokens"]: value for x in records if x.get("tokens") and (value := compared(x, metric)) is not None}
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
