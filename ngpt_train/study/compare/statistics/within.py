"""The speed-up within one schedule, as it is often claimed: when, on its way, does the better arm reach the loss that
the other one ends at? It flatters whoever decays faster, and is said beside the annealed one, never instead of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from ngpt_train.study.compare.statistics.intervals import t_quantile
from ngpt_train.study.compare.statistics.matched import Ratio

FLATTERS = "within one schedule, which flatters the arm whose learning rate decays faster"

Records = Sequence[Mapping[str, Any]]


def within_schedule(logs: Mapping[int, Sequence[float]], confidence: float) -> dict[int, Ratio]:
    """By budget: tokens of the baseline over those of the arm for the same loss.

    logs: `log_ratio` of the runs of each seed, by budget. Their variance between seeds is pooled over budgets.
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
    """Of two runs, by their eval records. Positive where the arm ends lower: then it is somewhere on its own way where
    the baseline ends. None where they were not validated on their way."""
    (tokens, losses), (of_baseline, baseline_losses) = (curve(records, metric) for records in (arm, baseline))
    if min(len(tokens), len(of_baseline)) < 2:
        return None
    if losses[-1] <= baseline_losses[-1]:
        there = reached(tokens, losses, baseline_losses[-1])
        return None if there is None else float(np.log(of_baseline[-1] / there))
    there = reached(of_baseline, baseline_losses, losses[-1])
    return None if there is None else float(np.log(there / tokens[-1]))


def curve(records: Records, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and the lowest loss so far of each validation after the first step; fp64, `(n,)`."""
    known: dict[float, float] = {
        x["tokens"]: x[metric] for x in records if x.get("tokens") and x.get(metric) is not None
    }
    tokens = np.array(sorted(known), dtype=float)
    return tokens, np.minimum.accumulate(np.array([known[t] for t in tokens], dtype=float))


def reached(tokens: np.ndarray, losses: np.ndarray, loss: float) -> float | None:
    """Tokens at which a falling curve reaches `loss`, between validations by a monotone cubic in log tokens; None where
    it does not, or is there from the first."""
    below = np.flatnonzero(losses <= loss)
    if len(below) == 0 or below[0] == 0:
        return None
    if losses[below[0]] == loss:
        return float(tokens[below[0]])
    first, last = np.log(tokens[below[0] - 1 : below[0] + 1])
    smooth = PchipInterpolator(np.log(tokens), losses)
    return float(np.exp(brentq(lambda x: float(smooth(x)) - loss, float(first), float(last), xtol=1e-12)))
