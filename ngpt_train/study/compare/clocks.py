"""The cost of a token in FLOPs and seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.statistics.equal_loss import Ratio
from ngpt_train.study.compare.statistics.intervals import t_quantile

MEASURED, OWN = "measured in turn", "own"
STEP_TIMES = "step_times.json"  # in the directory of a report

StepTimes = Mapping[str, Mapping[str, Any]]  # by arm, as `step_times.measure` returns them


@dataclass(frozen=True)
class Cost:
    """The cost of a baseline's token over the cost of an arm's token. log_error: the standard error of its logarithm,
    with `df` degrees of freedom."""

    ratio: float
    log_error: float = 0.0
    df: float = 1e6


def own_clock(arm: Sequence[Run], baseline: Sequence[Run]) -> Cost | None:
    """None if the records of one arm have no times."""
    logs = [np.log([s for run in runs if (s := run.seconds_per_token)]) for runs in (baseline, arm)]
    if not (len(logs[0]) and len(logs[1])):
        return None
    error = float(np.sqrt(sum(np.var(x, ddof=1) / len(x) for x in logs if len(x) > 1)))
    df = max(sum(len(x) - 1 for x in logs), 1)
    return Cost(float(np.exp(logs[0].mean() - logs[1].mean())), error, df)


def measured(step_times: StepTimes, arm: str, baseline: str) -> Cost | None:
    """None if one of the two was not timed."""
    if arm not in step_times or baseline not in step_times:
        return None
    ones, others = (np.log(np.array(step_times[name]["seconds_per_token"])) for name in (baseline, arm))
    ratios = ones - others  # of the same round, so the load of the machine cancels
    error = float(np.std(ratios, ddof=1) / np.sqrt(len(ratios)))
    return Cost(float(np.exp(np.mean(ratios))), error, len(ratios) - 1)


def flops(arm: Sequence[Run], baseline: Sequence[Run]) -> Cost | None:
    found = [[x for run in runs if (x := run.flops_per_token)] for runs in (baseline, arm)]
    return Cost(statistics.fmean(found[0]) / statistics.fmean(found[1])) if found[0] and found[1] else None


def costs_between(
    arm: str, baseline: str, runs: Mapping[str, Sequence[Run]], step_times: StepTimes
) -> dict[tuple[str, str | None], Cost]:
    """The known costs by unit and clock. runs: by the name of the arm."""
    found = {
        ("tokens", None): Cost(1.0),
        ("flops", None): flops(runs[arm], runs[baseline]),
        ("seconds", MEASURED): measured(step_times, arm, baseline),
        ("seconds", OWN): own_clock(runs[arm], runs[baseline]),
    }
    return {unit: cost for unit, cost in found.items() if cost is not None}


def in_units(ratio: Ratio, cost: Cost, confidence: float) -> Ratio:
    """The ratio of tokens times the ratio of their costs; the two errors are independent."""
    if ratio.estimate is None:
        return Ratio(None, None, None, ratio.extrapolated, ratio.note)
    of_cost = float(t_quantile(confidence, cost.df)) * cost.log_error

    def end(value: float | None, side: int) -> float | None:
        if value is None or ratio.estimate is None:
            return None
        return cost.ratio * ratio.estimate * float(np.exp(side * np.hypot(np.log(value / ratio.estimate), of_cost)))

    return Ratio(cost.ratio * ratio.estimate, end(ratio.low, -1), end(ratio.high, 1), ratio.extrapolated, ratio.note)


def costs_of(name: str, runs: Sequence[Run], step_times: StepTimes) -> dict[str, Any]:
    """The entry of the arm in `costs` of report.json."""
    memory = [x["memory_gb"] for run in runs for x in run.train if x.get("memory_gb") is not None]
    own = [x["step_time"] for run in runs for x in run.train if x.get("step_time") is not None]
    of_own = statistics.median(own) if own else None
    in_turn = step_times.get(name)
    return {
        "arm": name,
        "n_params": _first(run.n_params for run in runs),
        "n_params_without_embeddings": _first(run.n_params_without_embeddings for run in runs),
        "flops_per_token": _first(run.flops_per_token for run in runs),
        "memory_gb": max(memory, default=None),
        "step_time": in_turn["step_time"] if in_turn else of_own,
        "step_time_how": MEASURED if in_turn else OWN if own else None,
        "step_time_own": of_own,
    }


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)
