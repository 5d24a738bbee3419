"""Whether the speed-up grows with the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ngpt_train.study.compare.statistics.intervals import Noise, Pair
from ngpt_train.study.compare.statistics.matched import EndLosses, Ratio, end_losses

_SMALL = 1e-4  # step in log tokens of a numerical derivative


@dataclass(frozen=True)
class Trend:
    """By what the speed-up is multiplied where the budget doubles: 1 says that it stays. low, high: None is not known.

    extrapolated: a speed-up lies beyond the baseline's budgets.
    """

    estimate: float
    low: float | None
    high: float | None
    budgets: tuple[int, ...]  # tokens, whose speed-ups are known
    extrapolated: bool


def trend_of(pair: Pair, noise: Noise, ratios: Sequence[Ratio], confidence: float) -> Trend | None:
    """The slope of log ratio over log budget; None where fewer than two budgets have a ratio, or where the fit is a
    line through two budgets: what it lacks in bend would pass for growth.

    ratios: of `annealed_ratio`, by budget, without an estimate where a budget shall not count. noise: `Noise(pair)`.
    The ratio r at budget x solves loss(r x) - loss(x) = difference, so that to first order

        loss'(r x) d log r = d difference - (d loss(r x) - d loss(x)),   loss' by log tokens,

    and the slope, a weighted sum of the log r, is a weighted sum of end losses, whose interval `noise` knows. The
    ratios share the fit and the baseline's runs: their intervals one by one would not say how sure the slope is.
    """
    known = [k for k, ratio in enumerate(ratios) if ratio.estimate is not None]
    curve, place = end_losses(pair)
    if len(known) < 2 or not curve.may_bend:
        return None
    log_r = np.log([float(ratios[k].estimate or 1) for k in known])  # (n,)
    here = pair.budgets[known]  # (n,)
    there = here * np.exp(log_r)
    u = np.zeros((len(known), len(place), 2))  # (n, K + M, 2): how log r moves with the end losses
    u[:, :, 0] = -(curve.weights(there) - curve.weights(here))[:, place]
    u[np.arange(len(known)), known, 1] = 1
    u /= _slope(curve, there)[:, None, None]

    variance = noise.spread(u).error ** 2
    weights = 1 / variance if np.all(variance > 0) else np.ones(len(known))  # nothing known, or no noise at all
    x = np.log(here) - np.average(np.log(here), weights=weights)
    share = weights * x / np.sum(weights * x**2)  # (n,) of each log r in the slope
    slope = float(share @ log_r)
    half = float(noise.spread(np.einsum("n,nki->ki", share, u)[None]).half_width(confidence)[0])
    low, high = (_factor(slope - half), _factor(slope + half)) if np.isfinite(half) else (None, None)
    extrapolated = any(ratios[k].extrapolated for k in known)
    return Trend(_factor(slope), low, high, tuple(int(x) for x in here), extrapolated)


def _factor(slope: float) -> float:
    return float(np.exp(slope * np.log(2)))


def _slope(curve: EndLosses, tokens: np.ndarray) -> np.ndarray:
    """(n,) derivative of the fitted loss by log tokens; below 0."""
    above, below = curve.at(tokens * np.exp(_SMALL)), curve.at(tokens * np.exp(-_SMALL))
    return np.asarray((above - below) / (2 * _SMALL))
