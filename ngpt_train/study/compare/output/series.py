"""The numbers of the figures, computed from the report."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ngpt_train.study.compare.end_losses import EndLosses
from ngpt_train.study.compare.output.wording import UNITS, Report
from ngpt_train.study.compare.phrases import MEASURED, NO_FORM

RATIOS = (  # each coarser than the one before
    (0.1, 0.125, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 12, 16, 24, 32),
    (0.125, 0.25, 0.33, 0.5, 0.67, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32),
)


def losses_by_seed(report: Report, arm: str) -> dict[int, dict[int, float]]:
    """losses[budget][seed], at the arm's best values."""
    best = {curve["run"] for curve in report["curves"] if curve["best"]}
    others = {curve["run"] for curve in report["curves"]} - best
    found: dict[int, dict[int, float]] = {}
    for entry in report["losses"]:
        if entry["arm"] == arm and entry["loss"] is not None and entry["run"] not in others:
            found.setdefault(entry["budget"], {})[entry["seed"]] = entry["loss"]
    return dict(sorted(found.items()))


def end_losses(report: Report, arm: str) -> dict[int, list[float]]:
    """losses[budget]: the loss of each seed, at the arm's best values."""
    return {budget: list(of_seeds.values()) for budget, of_seeds in losses_by_seed(report, arm).items()}


def axis_title(report: Report, axis: str) -> str:
    if axis == "seconds":
        return f"training time (s, {'step times measured in turn' if _measured(report) else 'own clocks'})"
    return {"tokens": "training tokens", "flops": "training FLOPs"}[axis]


def eval_axis(report: Report, curve: Mapping[str, Any], axis: str) -> list[float | None]:
    """The places of a run's validations on the axis. Seconds are steps times the step time measured in turn; without
    one, they come from the run's own clock, which depends on the load of the machine."""
    evals = curve["eval"]
    if axis == "seconds" and (step_times := _measured(report)):
        return [_product(step, step_times.get(curve["arm"])) for step in evals["step"]]
    if axis == "flops" and None in evals["flops"]:
        per_token = {cost["arm"]: cost["flops_per_token"] for cost in report["costs"]}.get(curve["arm"])
        return [_product(tokens, per_token) for tokens in evals["tokens"]]
    return list(evals[axis])


def _measured(report: Report) -> dict[str, float]:
    """Seconds a step by arm; empty unless all were measured in turn."""
    found = {cost["arm"]: cost["step_time"] for cost in report["costs"] if cost["step_time_how"] == MEASURED}
    return found if len(found) == len(report["arms"]) else {}


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def cost_of(report: Report, arm: str, budget: float, axis: str) -> float | None:
    """The arm's cost of `budget` tokens in tokens, FLOPs or seconds; None if unknown."""
    if axis == "tokens":
        return float(budget)
    curves = [curve for curve in report["curves"] if curve["arm"] == arm and curve["eval"]["tokens"]]
    ends = [(curve["eval"]["tokens"][-1], eval_axis(report, curve, axis)[-1]) for curve in curves]
    rates = [cost / tokens for tokens, cost in ends if tokens and cost]
    return float(budget * np.median(rates)) if rates else None


def axes_of(report: Report) -> list[str]:
    """The units among tokens, FLOPs and seconds with a curve."""
    return [axis for axis in UNITS if any(any(eval_axis(report, curve, axis)) for curve in report["curves"])]


def train_axis(report: Report, curve: Mapping[str, Any], axis: str) -> list[float | None]:
    """The places of a run's train records on the axis, by linear interpolation between its validations."""
    tokens = curve["train"]["tokens"]
    if axis == "tokens":
        return list(tokens)
    at = zip(curve["eval"]["tokens"], eval_axis(report, curve, axis), strict=True)
    known = [(t, x) for t, x in at if t is not None and x is not None]
    if not known:
        return [None] * len(tokens)
    at_tokens, x = np.array([(0.0, 0.0), *known]).T
    return [float(value) for value in np.interp(tokens, at_tokens, x)]


def speedups(report: Report, arm: str, unit: str, how: str) -> list[Mapping[str, Any]]:
    """The entries with an estimate, by budget."""
    found = [s for s in report["speedups"] if (s["arm"], s["unit"], s["how"]) == (arm, unit, how)]
    return sorted((s for s in found if s["estimate"] is not None), key=lambda s: s["budget"])


def state_at(report: Report, arm: str, budget: int) -> bool:
    """True if the arm is tuned at this budget. Without an entry for the budget, True if it is tuned at all."""
    states = [t["state"] for t in report["tuning"] if (t["arm"], t["budget"]) == (arm, budget)]
    return all(state == "bracketed" for state in states) if states else bool(report["arms"][arm]["tuned"])


def arrows(report: Report, axis: str) -> Iterator[tuple[str, float, float, float]]:
    """Matched loss: (arm, the arm's cost at a budget, the baseline's cost for the same loss, the loss)."""
    for arm in report["arms"]:
        losses = end_losses(report, arm)
        for entry in speedups(report, arm, axis, "annealed"):
            start = cost_of(report, arm, entry["budget"], axis)
            if start is not None and entry["budget"] in losses:
                yield arm, start, start * entry["estimate"], float(np.mean(losses[entry["budget"]]))


def means(entry: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """The points of a tuning curve: (value, loss averaged over the seeds) by value, without failed points."""
    by_value: dict[Any, list[float]] = {}
    for point in entry["points"]:
        if not point["failed"] and point["loss"] is not None:
            by_value.setdefault(point["value"], []).append(point["loss"])
    averaged = [(value, float(np.mean(losses))) for value, losses in by_value.items()]
    return sorted(averaged, key=lambda point: point[0]) if is_numeric(entry) else averaged


def is_numeric(entry: Mapping[str, Any]) -> bool:
    """True if the tuned values have logarithms."""
    return all(type(point["value"]) in (int, float) and point["value"] > 0 for point in entry["points"])


def _lowest(entry: Mapping[str, Any]) -> float:
    """The loss at the lowest point of the parabola, fitted to the best point and its neighbours. Each weighs as many
    runs as it has, like in the fit of the optimum."""
    points = means(entry)
    best = min(range(len(points)), key=lambda k: points[k][1])
    near = points[max(best - 1, 0) : best + 2]
    counts = [sum(p["value"] == value and not p["failed"] for p in entry["points"]) for value, _ in near]
    rest = [loss - entry["price_of_two"] * math.log2(value / entry["optimum"]) ** 2 for value, loss in near]
    return float(np.average(rest, weights=counts))


def has_parabola(entry: Mapping[str, Any]) -> bool:
    known = entry["optimum"] is not None and entry["price_of_two"] is not None
    return known and is_numeric(entry) and bool(means(entry))


def parabola(entry: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """The parabola in log2 of the value, up to one and a half octaves from the optimum, inside the tried values."""
    if not has_parabola(entry):
        return None
    optimum, points = entry["optimum"], means(entry)
    left = max(-1.5, math.log2(points[0][0] / optimum))
    right = min(1.5, math.log2(points[-1][0] / optimum))
    octaves = np.linspace(left, right, 31)
    losses = _lowest(entry) + entry["price_of_two"] * octaves**2
    return [float(x) for x in optimum * 2**octaves], [float(y) for y in losses]


def sensitivity(entry: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """(octaves off the optimum, loss above the parabola's lowest); without a parabola, off the best tried value."""
    points = means(entry)
    if len(points) < 2 or not is_numeric(entry):
        return None
    optimum, lowest = min(points, key=lambda point: point[1])
    if has_parabola(entry):
        optimum, lowest = entry["optimum"], _lowest(entry)
    return [math.log2(x / optimum) for x, _ in points], [y - lowest for _, y in points]


def ratio_ticks(values: Sequence[float]) -> list[float]:
    """At most nine round ratios around the values, with 1."""
    low, high = min([*values, 0.9]) / 1.1, max([*values, 1.1]) * 1.1
    inside = ([ratio for ratio in ratios if low <= ratio <= high] for ratios in RATIOS)
    return next(ticks for ticks in inside if len(ticks) <= 9)


def fit(report: Report, arm: str) -> tuple[list[float], list[float]] | None:
    """The fit of the baseline's end losses, (tokens, losses); None for other arms, one budget, and a refused fit."""
    losses = end_losses(report, arm)
    is_refused = any(NO_FORM in (s["note"] or "") for s in report["speedups"])
    if arm != report["baseline"] or len(losses) < 2 or is_refused:
        return None
    ends = np.array([(budget, np.mean(x), len(x)) for budget, x in losses.items()]).T
    curve = EndLosses(*ends)
    at = np.geomspace(min(losses), max(losses), 60)
    return [float(x) for x in at], [float(y) for y in curve.at(at)]
