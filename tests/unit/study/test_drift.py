"""The drift of the best learning rate: planted drifts, their intervals and verdicts."""

import math

import numpy as np
import pytest

from ngpt_train.study.transfer.drift import At, Drift, fit_drift

WIDTHS = [64, 128, 256, 512]


def points(slope: float, halves: list[float], errors: list[float] | None = None) -> list[At]:
    """Best rates 0.02 (width / 64)^slope with intervals of +- so many octaves, off by `errors` octaves."""
    found = []
    for width, half, error in zip(WIDTHS, halves, errors or [0.0] * 4, strict=False):
        lr = 0.02 * (width / 64) ** slope * 2**error
        found.append(At(width, lr, lr * 2**-half, lr * 2**half))
    return found


@pytest.mark.parametrize(
    ("slope", "half", "verdict"),
    [(-0.5, 0.1, "drifts"), (0.5, 0.1, "drifts"), (-0.05, 0.1, "transfers"), (-0.05, 1.0, "not resolved")],
)
def test_verdicts(slope: float, half: float, verdict: str) -> None:
    """Caught: a drift per octave of size for that over the range; a rate that transfers for want of data."""
    drift = fit_drift(points(slope, [half] * 4), within=0.5, confidence=0.95)
    assert drift.verdict == verdict
    assert drift.octaves == pytest.approx(3 * slope)
    assert drift.slope == pytest.approx(slope)
    # Of four equal points at 0, 1, 2, 3 octaves: 3 octaves times half / sqrt(5).
    assert [drift.low, drift.high] == pytest.approx([3 * slope - 3 * half / 5**0.5, 3 * slope + 3 * half / 5**0.5])


def test_within_is_of_the_interval_and_not_of_the_estimate() -> None:
    """0.3 octaves within +- 0.25: neither inside half an octave, nor 0."""
    two = [At(64, 0.01, 0.01, 0.01), At(128, 0.01 * 2**0.3, 0.01 * 2**0.05, 0.01 * 2**0.55)]
    assert fit_drift(two, 0.5, 0.95).verdict == "drifts"
    assert fit_drift(two, 0.6, 0.95).verdict == "transfers"


def test_an_uncertain_point_counts_less() -> None:
    """Caught: an unweighted fit."""
    drift = fit_drift(points(0.0, [0.05, 0.05, 0.05, 3.0], [0.0, 0.0, 0.0, -2.0]), 0.5, 0.95)
    assert abs(drift.octaves) < 0.05
    assert drift.verdict == "transfers"


def test_points_off_the_line_widen_the_interval() -> None:
    straight = fit_drift(points(0.2, [0.1] * 4), 0.5, 0.95)
    bent = fit_drift(points(0.2, [0.1] * 4, [0.0, 0.6, -0.6, 0.0]), 0.5, 0.95)
    assert width_of(bent) > 4 * width_of(straight)


def width_of(drift: Drift) -> float:
    assert drift.low is not None
    assert drift.high is not None
    return drift.high - drift.low


def test_an_unknown_interval_resolves_nothing() -> None:
    """One seed: the noise is not known, whatever the rates."""
    line = [*points(-1.0, [0.1] * 3), At(512, 0.0025, None, None)]
    drift = fit_drift(line, 0.5, 0.95)
    assert (drift.low, drift.high, drift.verdict) == (None, None, "not resolved")
    assert drift.octaves == pytest.approx(-3)


def test_a_single_size_has_no_drift() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_drift([At(64, 0.01, 0.009, 0.011)] * 2, 0.5, 0.95)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("slope", [0.0, -0.5])
def test_the_interval_covers_the_truth(n: int, slope: float) -> None:
    """1,000 draws whose optima have the noise that their intervals say. Caught: intervals of the slope for the range's,
    a factor for scatter that makes them narrow. That factor makes them wider than nominal where points are few."""
    rng, halves, covered = np.random.default_rng(0), [0.2, 0.4, 0.3, 0.6], 0
    z = 1.959964
    for _ in range(1000):
        errors = [rng.normal(0, half / z) for half in halves[:n]]
        drift = fit_drift(points(slope, halves[:n], errors), 0.5, 0.95)
        truth = slope * math.log2(WIDTHS[n - 1] / WIDTHS[0])
        covered += width_of(drift) > 0 and float(drift.low or 0) <= truth <= float(drift.high or 0)
    assert 0.935 <= covered / 1000 <= 0.99
