"""The speed-up within one schedule, as it is often claimed: when, on its way, does the better arm reach the loss that the
other one ends at? It flatters whoever decays faster, and is said beside the annealed one, never instead of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from ngpt_train.study.compare.statistics.intervals import t_quantile
from ngpt_train.study.compare.statistics.matched import Ratio
from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.trials import Arm, is_number

FLATTERS = "within one schedule, which flatters the arm whose learning rate decays faster"


def within_schedule(arm: Arm, baseline: Arm, metric: str, confidence: float) -> dict[int, Ratio]:
    """By budget: tokens of the baseline over those of the arm for the same loss, between runs of one seed and one
    schedule. The variance between seeds of its logarithm is pooled over budgets."""
    logs: dict[int, np.ndarray] = {}
    for budget in sorted(set(arm.best) & set(baseline.best)):
        ones, others = arm.at_best(budget), baseline.at_best(budget)
        found = [log_ratio(ones[s].run, others[s].run, metric) for s in sorted(ones.keys() & others.keys())]
        if known := [x for x in found if x is not None]:
            logs[budget] = np.array(known)
    df = sum(len(x) - 1 for x in logs.values())
    variance = sum(float(np.sum((x - x.mean()) ** 2)) for x in logs.values()) / max(df, 1)
    ratios = {}
    for budget, x in logs.items():
        estimate = float(np.exp(x.mean()))
        if len(x) < 2:
            ratios[budget] = Ratio(estimate, None, None, note=f"{FLATTERS}; one seed")
            continue
        factor = float(np.exp(t_quantile(confidence, df) * np.sqrt(variance / len(x))))
        ratios[budget] = Ratio(estimate, estimate / factor, estimate * factor, note=FLATTERS)
    return ratios


def log_ratio(arm: Run, baseline: Run, metric: str) -> float | None:
    """Positive where the arm ends lower: then it is at some place of its own schedule where the baseline ends."""
    ends = [curve(run, metric) for run in (arm, baseline)]
    if any(len(tokens) < 2 for tokens, _ in ends):
        return None
    (tokens, losses), (of_baseline, baseline_losses) = ends
    if losses[-1] <= baseline_losses[-1]:
        there = reached(tokens, losses, baseline_losses[-1])
        return None if there is None else float(np.log(of_baseline[-1] / there))
    there = reached(of_baseline, baseline_losses, losses[-1])
    return None if there is None else float(np.log(there / tokens[-1]))


def curve(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and the lowest loss so far of each validation after the first step."""
    of_run: Mapping[float, float] = {
        x["tokens"]: x[metric]
        for x in run.evals
        if is_number(x.get("tokens")) and x["tokens"] > 0 and is_number(x.get(metric))
    }
    tokens = np.array(sorted(of_run), dtype=float)
    return tokens, np.minimum.accumulate(np.array([of_run[x] for x in tokens]))


def reached(tokens: np.ndarray, losses: np.ndarray, loss: float) -> float | None:
    """Tokens at which a falling curve reaches `loss`, between validations by a monotone cubic in log tokens; None where
    it does not, or is there from the first."""
    below = np.flatnonzero(losses <= loss)
    if len(below) == 0 or below[0] == 0:
        return None
    between = np.log(tokens[below[0] - 1 : below[0] + 1])
    smooth = PchipInterpolator(np.log(tokens), losses)
    return float(np.exp(brentq(lambda x: float(smooth(x)) - loss, *between, xtol=1e-12)))
