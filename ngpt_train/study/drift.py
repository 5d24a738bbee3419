"""The best learning rate of each architecture and size in studies and runs, and its change along a size, in octaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.study.compare.arms import found_arms, grouped
from ngpt_train.study.compare.given_runs import gather
from ngpt_train.study.compare.runs import Run, common_budgets
from ngpt_train.study.compare.trials import read_arm, unfinished
from ngpt_train.study.definition import LR
from ngpt_train.study.tuning import Tuning

TRANSFERS, DRIFTS, NOT_RESOLVED = "transfers", "drifts", "not resolved"
AXES = {"width": "width", "depth": "depth", "horizon": "tokens"}  # axis -> field of Optimum
_LEAST_OCTAVES = 1e-3  # half the width of an interval at least: a width of 0 would have infinite weight
# Keys that change with the width, depth and length of a run.
SIZES = {
    *(f"model.{name}" for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "n_encoder_layers")),
    "train.steps",
}
# The best rate and its interval, which is None if the noise is unknown (one seed).
Rate = tuple[float, float | None, float | None]


@dataclass(frozen=True)
class Optimum:
    """The best learning rate at a size and budget. architecture: a name for all keys but the sizes."""

    architecture: str
    width: int
    depth: int
    tokens: int
    tuning: Tuning
    n_seeds: int  # at the best tried value
    model: str  # model.name of its runs
    optim: str  # their optim.name
    context: int

    @property
    def is_tuned(self) -> bool:
        return self.tuning.state == "bracketed" and self.tuning.optimum is not None

    @property
    def rate(self) -> Rate:
        """Of a tuned one."""
        assert self.tuning.optimum is not None
        return self.tuning.optimum, self.tuning.low, self.tuning.high


@dataclass(frozen=True)
class Optima:
    """Optima with the confidence of their intervals, and sentences about left-out runs."""

    found: list[Optimum]
    metric: str
    confidence: float
    notes: list[str]


def read_optima(paths: Sequence[Path], confidence: float | None = None) -> Optima:
    """The optima of studies, runs, and directories of runs. Raises DataError if one has no run, or none has ended."""
    runs: list[Run] = []
    tuned, metrics, confidences = {LR}, set[str](), list[float]()
    for path in paths:
        gathered = gather([path])
        tuned |= set(gathered.tuned or ())
        metrics.add(gathered.metric or "loss")
        confidences.append(gathered.confidence)
        seen = {run.path.resolve() for run in runs}
        runs += [run for run in gathered.runs if run.path.resolve() not in seen]
    if len(metrics) > 1:
        raise DataError("the studies have different metrics: loss, and bits per byte. Name those of one metric.")
    reasons = {run.path: reason for run in runs if (reason := unfinished(run))}
    notes = [f"{path} is left out: {reason}" for path, reason in reasons.items()]
    ended = [run for run in runs if run.path not in reasons]
    if not ended:
        raise DataError(f"no run has ended in {', '.join(map(str, paths))}")
    confidence, (metric,) = confidence or max(confidences), metrics
    found = []
    groups = found_arms(ended, {*tuned, *SIZES})
    budgets = common_budgets(groups)
    for name, group in groups.items():
        for of_size in sorted(grouped(group, _width_and_depth), key=lambda runs: _width_and_depth(runs[0])):
            arm, config = read_arm(name, of_size, budgets, tuned, metric, confidence), of_size[0].config
            for (budget, key), tuning in sorted(arm.tunings.items()):
                if key == LR:
                    sizes, context = (*_width_and_depth(of_size[0]), budget), _size(of_size[0], "context")
                    names = str(config["model.name"]), str(config.get("optim.name", "adamw"))
                    found.append(Optimum(name, *sizes, tuning, len(arm.at_best(budget)), *names, context))
    return Optima(found, metric, confidence, notes)


def _width_and_depth(run: Run) -> tuple[int, int]:
    return _size(run, "d_model"), _size(run, "n_layers")


def _size(run: Run, name: str) -> int:
    return int(run.config.get(f"model.{name}", getattr(ModelConfig, name)))


@dataclass(frozen=True)
class Drift:
    """A fit of log2 lr = a + slope log2 size. `octaves` is slope times the range, log2(largest / smallest size)."""

    slope: float
    octaves: float
    low: float | None  # of octaves
    high: float | None
    verdict: str
    intercept: float  # log2 lr at size 1


def fit_drift(sizes: Sequence[float], rates: Sequence[Rate], within: float, confidence: float) -> Drift:
    """The drift over two or more `sizes`, with the best rate of each. All intervals have the same confidence.

    A least-squares line, each rate weighted by the wider side of its interval. If the rates scatter more than their
    intervals allow, the drift's interval grows by that factor. Without the interval of a rate the drift has none.

    The verdict is "transfers" if the interval lies within +-`within` octaves, else "drifts" if it excludes 0, else "not
    resolved".
    """
    x = np.array([math.log2(size) for size in sizes])
    y = np.array([math.log2(lr) for lr, _, _ in rates])
    ends = [(lr, low, high) for lr, low, high in rates if low is not None and high is not None]
    known = [max(math.log2(lr / low), math.log2(high / lr), _LEAST_OCTAVES) for lr, low, high in ends]
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    sigma = np.array(known) / z if len(known) == len(rates) else np.ones(len(rates))
    weights = sigma**-2
    centre = float(weights @ x / weights.sum())
    information = float(weights @ (x - centre) ** 2)  # 1 / variance of the slope
    slope = float(weights @ ((x - centre) * y) / information)
    intercept = float(weights @ y / weights.sum()) - slope * centre
    span = float(np.ptp(x))
    octaves = slope * span
    if len(known) < len(rates):
        return Drift(slope, octaves, None, None, NOT_RESOLVED, intercept)
    free = len(rates) - 2
    excess = float(weights @ (y - intercept - slope * x) ** 2) / free if free else 1.0
    half = z * span * math.sqrt(max(1.0, excess) / information)
    low, high = octaves - half, octaves + half
    verdict = DRIFTS if low > 0 or high < 0 else NOT_RESOLVED
    return Drift(slope, octaves, low, high, TRANSFERS if -within <= low and high <= within else verdict, intercept)


@dataclass(frozen=True)
class Axis:
    """The optima of an architecture along one size."""

    architecture: str
    name: str  # width, depth or horizon
    at: dict[str, int]  # the other two sizes
    points: list[Optimum]  # tuned optima by size
    drift: Drift | None  # None for fewer than two tuned optima
    confidence: float  # of the drift's interval
    within: float  # octaves within which a rate transfers

    def size(self, optimum: Optimum) -> int:
        return int(getattr(optimum, AXES[self.name]))

    @property
    def sentence(self) -> str:
        start, drift = f"{self.architecture} at {place_of(self.at)}", self.drift
        if drift is None:
            return f"{start}: the drift with {self.name} is not known, fewer than two sizes are tuned."
        sizes = f"{self.name} {self.size(self.points[0]):,} to {self.size(self.points[-1]):,}"
        how = f"over {sizes} ({len(self.points)} sizes) the best lr changes by {drift.octaves:+.2f} octaves"
        how += f" (a factor of {2**drift.octaves:.2f}"
        if drift.low is None or drift.high is None:
            return f"{start}: {how}), not resolved: an optimum without an interval, as with one seed."
        how += f"; {self.confidence:.0%} interval {drift.low:+.2f} to {drift.high:+.2f})"
        meaning = {
            TRANSFERS: f"it transfers, within {self.within:g} octaves",
            DRIFTS: "it drifts",
            NOT_RESOLVED: f"not resolved: neither within {self.within:g} octaves nor apart from 0",
        }
        return f"{start}: {how}: {meaning[drift.verdict]}."


def axes_of(optima: Optima, within: float) -> list[Axis]:
    """Each line of two or more sizes."""
    found = []
    for name, field in AXES.items():
        others = attrgetter("architecture", *(other for other in AXES.values() if other != field))
        for line in grouped(optima.found, others):
            if len(line) < 2:
                continue
            points = sorted((one for one in line if one.is_tuned), key=attrgetter(field))
            drift = None
            if len(points) > 1:
                sizes, rates = [getattr(one, field) for one in points], [one.rate for one in points]
                drift = fit_drift(sizes, rates, within, optima.confidence)
            at = {other: getattr(line[0], other) for other in AXES.values() if other != field}
            found.append(Axis(line[0].architecture, name, at, points, drift, optima.confidence, within))
    return found


def place_of(at: dict[str, int]) -> str:
    """The given sizes in words."""
    words = {"width": "width {:,}", "depth": "{:,} layers", "tokens": "{:,} tokens"}
    return ", ".join(text.format(at[name]) for name, text in words.items() if name in at)
