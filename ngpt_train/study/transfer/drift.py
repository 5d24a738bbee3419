"""The change of the best learning rate over a range of sizes, in octaves, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

TRANSFERS, DRIFTS, NOT_RESOLVED = "transfers", "drifts", "not resolved"
_LEAST_OCTAVES = 1e-3  # half the width of an interval at least: a width of 0 would have infinite weight


@dataclass(frozen=True)
class At:
    """The best learning rate at a size, with its interval; None if the noise is unknown (one seed)."""

    size: float
    lr: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Drift:
    """A fit of log2 lr = a + slope log2 size. `octaves` is slope times the range, log2(largest / smallest size)."""

    slope: float
    octaves: float
    low: float | None  # of octaves
    high: float | None
    verdict: str
    intercept: float  # log2 lr at size 1


def fit_drift(points: Sequence[At], within: float, confidence: float) -> Drift:
    """The drift over the sizes of `points`. All intervals have the same confidence. Raises ValueError for fewer than
    two sizes.

    A least-squares line, each point weighted by the wider side of its interval. If the points scatter more than their
    intervals allow, the drift's interval grows by that factor. Without the interval of a point the drift has none.

    The verdict is "transfers" if the interval lies within +-`within` octaves, else "drifts" if it excludes 0, else "not
    resolved".
    """
    x = np.array([math.log2(point.size) for point in points])
    y = np.array([math.log2(point.lr) for point in points])
    if len(set(x)) < 2:
        raise ValueError("a drift needs two sizes or more")
    halves = [_half_octaves(point) for point in points]
    known = [half for half in halves if half is not None]
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    sigma = np.array(known) / z if len(known) == len(points) else np.ones(len(points))
    weights = sigma**-2
    centre = float(weights @ x / weights.sum())
    information = float(weights @ (x - centre) ** 2)  # 1 / variance of the slope
    slope = float(weights @ ((x - centre) * y) / information)
    intercept = float(weights @ y / weights.sum()) - slope * centre
    octaves, span = slope * float(np.ptp(x)), float(np.ptp(x))
    if len(known) < len(points):
        return Drift(slope, octaves, None, None, NOT_RESOLVED, intercept)
    free = len(points) - 2
    excess = float(weights @ (y - intercept - slope * x) ** 2) / free if free else 1.0
    half = z * span * math.sqrt(max(1.0, excess) / information)
    low, high = octaves - half, octaves + half
    return Drift(slope, octaves, low, high, _verdict(low, high, within), intercept)


def _half_octaves(point: At) -> float | None:
    if point.low is None or point.high is None:
        return None
    return max(math.log2(point.lr / point.low), math.log2(point.high / point.lr), _LEAST_OCTAVES)


def _verdict(low: float, high: float, within: float) -> str:
    if -within <= low and high <= within:
        return TRANSFERS
    return DRIFTS if low > 0 or high < 0 else NOT_RESOLVED
