"""An arm against the baseline: differences at equal tokens; tokens, FLOPs, seconds at equal loss; the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ngpt_train.study.compare import clocks
from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.statistics.equal_loss import Ratio, annealed_ratio, log_ratio, trend_of, within_schedule
from ngpt_train.study.compare.statistics.intervals import Difference, Noise, Pair, detectable, difference_at, needed
from ngpt_train.study.compare.trials import Arm, pair_of

POOLED = "The noise between seeds is pooled over budgets: it is taken to be alike at all of them."
ONE_SEED = "one seed: the interval is without the noise between seeds"

StepTimes = Mapping[str, Mapping[str, Any]]  # by arm, as `step_times.py` measures them


@dataclass
class Versus:
    """The entries of report.json for an arm and the baseline."""

    verdict: str
    differences: list[dict[str, Any]] = field(default_factory=list)
    speedups: list[dict[str, Any]] = field(default_factory=list)
    trends: list[dict[str, Any]] = field(default_factory=list)  # one at most
    notes: list[str] = field(default_factory=list)


def versus(
    arm: Arm,
    baseline: Arm,
    runs: Mapping[str, Sequence[Run]],
    metric: str,
    confidence: float,
    step_times: StepTimes,
) -> Versus:
    """runs: of each arm, by its name."""
    pair, notes = pair_of(arm, baseline, metric)
    for x in (arm, baseline):
        notes += [_why_no_loss(x, budget) for budget in sorted({t.budget for t in x.trials} - set(x.best))]
    if pair is None:
        return Versus(verdict(arm.state(None), baseline.state(None), None), notes=notes)
    noise = Noise(pair)
    if len(pair.budgets) > 1 and noise.difference_df:
        notes.append(POOLED)
        notes += _noise_by_budget(pair, arm.name, baseline.name)
    found = [difference_at(pair, noise, at, confidence) for at in range(len(pair.budgets))]
    last = int(pair.budgets[-1])
    word = verdict(arm.state(last), baseline.state(last), found[-1])
    result = Versus(word, notes=[*notes, why(word, arm, baseline, last, found[-1])])
    costs = _costs(runs[arm.name], runs[baseline.name], arm.name, baseline.name, step_times)
    of_schedule = _within_schedule(arm, baseline, metric, confidence)
    annealed = [annealed_ratio(pair, noise, at, confidence) for at in range(len(pair.budgets))]
    for at, budget in enumerate(map(int, pair.budgets)):
        names = {"arm": arm.name, "baseline": baseline.name}
        steps = next(iter(arm.at_best(budget).values())).run.steps
        missing = None if found[at].is_resolved else needed(pair, found[at], at, steps, confidence)
        entry = _of_difference(found[at], confidence, missing)
        result.differences.append({**names, "budget": budget, **entry})
        ratios = {"annealed": annealed[at]}
        ratios |= {"within_schedule": of_schedule[budget]} if budget in of_schedule else {}
        untuned = [f"{x.name} is untuned at this budget" for x in (arm, baseline) if x.state(budget) == "edge"]
        for how, ratio in ratios.items():
            alone = ONE_SEED if found[at].n_seeds == 1 and how == "annealed" and ratio.low is not None else None
            for converted, more in _in_all_units(ratio, costs, confidence):
                note = "; ".join(filter(None, [*untuned, alone, converted.note, more.pop("note", None)])) or None
                value = _of_ratio(converted, confidence)
                result.speedups.append({**names, "how": how, "budget": budget, **value, **more, "note": note})
    result.trends = _trend(arm, baseline, pair, noise, annealed, confidence)
    return result


def _noise_by_budget(pair: Pair, arm: str, baseline: str) -> list[str]:
    """Notes on the noise of each budget, which is pooled; none where one budget alone has several seeds."""
    several = [
        (b, of_seeds) for b, of_seeds, n in zip(pair.budgets, pair.difference, pair.n_seeds, strict=True) if n > 1
    ]
    if len(several) < 2:
        return []
    said = ", ".join(f"{np.nanstd(of_seeds, ddof=1):.2g} at {int(b):,} tokens" for b, of_seeds in several)
    return [f"{arm} less {baseline}, standard deviation of the difference between seeds: {said}."]


def _why_no_loss(arm: Arm, budget: int) -> str:
    runs = [trial for trial in arm.trials if trial.budget == budget]
    failed = sum(trial.loss is None for trial in runs)
    why = f"{failed} of {len(runs)} runs failed, and there is no value with which all seeds ended"
    return f"{arm.name} has no loss at {budget:,} tokens, and is not compared there: {why}."


def _trend(
    arm: Arm, baseline: Arm, pair: Pair, noise: Noise, ratios: Sequence[Ratio], confidence: float
) -> list[dict[str, Any]]:
    """The trend over the budgets at which both arms are tuned, or were not to be."""
    unknown = Ratio(None, None, None)
    counted = [
        unknown if "edge" in (arm.state(budget), baseline.state(budget)) else ratio
        for budget, ratio in zip(map(int, pair.budgets), ratios, strict=True)
    ]
    found = trend_of(pair, noise, counted, confidence)
    if found is None:
        return []
    value = {**asdict(found), "confidence": confidence}
    return [{"arm": arm.name, "baseline": baseline.name, **value}]


def _costs(
    arm: Sequence[Run], baseline: Sequence[Run], name: str, of_baseline: str, step_times: StepTimes
) -> dict[str, clocks.Cost | None]:
    own, in_turn = clocks.own_clock(arm, baseline), clocks.measured(step_times, name, of_baseline)
    return {"tokens": clocks.Cost(1.0), "flops": clocks.flops(arm, baseline), clocks.MEASURED: in_turn, clocks.OWN: own}


def _in_all_units(
    ratio: Ratio, costs: Mapping[str, clocks.Cost | None], confidence: float
) -> Iterator[tuple[Ratio, dict[str, Any]]]:
    """The ratio in each unit that is known. Seconds are of the step times that were measured in turn, else of the runs'
    own clocks, which are shown beside them."""
    for unit in ("tokens", "flops"):
        if (cost := costs[unit]) is not None:
            yield clocks.in_units(ratio, cost, confidence), {"unit": unit, "clock": None}
    own, in_turn = costs[clocks.OWN], costs[clocks.MEASURED]
    if in_turn is not None:
        beside = f"by the runs' own clocks {own.ratio * ratio.estimate:.3g}" if own and ratio.estimate else None
        more = {"unit": "seconds", "clock": clocks.MEASURED, "note": beside}
        yield clocks.in_units(ratio, in_turn, confidence), more
    elif own is not None:
        yield clocks.in_units(ratio, own, confidence), {"unit": "seconds", "clock": clocks.OWN}


def _within_schedule(arm: Arm, baseline: Arm, metric: str, confidence: float) -> dict[int, Ratio]:
    """By budget, where the runs of a seed were validated on their way."""
    logs = {}
    for budget in sorted(set(arm.best) & set(baseline.best)):
        ones, others = arm.at_best(budget), baseline.at_best(budget)
        found = [log_ratio(ones[s].run.evals, others[s].run.evals, metric) for s in ones if s in others]
        if known := [x for x in found if x is not None]:
            logs[budget] = known
    return within_schedule(logs, confidence) if logs else {}


def verdict(arm_state: str, baseline_state: str, found: Difference | None) -> str:
    """The verdict at the largest budget that both arms have, at equal tokens. untuned: the optimum of one is not inside
    the values that were tried, or only one of the two was tuned at all."""
    states = {arm_state, baseline_state}
    if "edge" in states or len(states) > 1:
        return "untuned"
    if found is None or not found.is_resolved:
        return "not_resolved"
    return "better" if found.estimate < 0 else "worse"


def why(word: str, arm: Arm, baseline: Arm, budget: int, found: Difference) -> str:
    """A sentence on the verdict."""
    start = f"{arm.name} against {baseline.name}: {word.replace('_', ' ')} at {budget:,} tokens"
    if word == "untuned":
        tuned = {"edge": "not tuned to an optimum inside its grid", "not tried": "not tuned"}
        states = [f"{x.name} is {tuned.get(x.state(budget), 'tuned')}" for x in (arm, baseline)]
        return f"{start}, because {' and '.join(states)}."
    if found.n_seeds < 2:
        return f"{start}, because one seed does not show the noise between seeds."
    rows = f"{found.n_rows} validation rows" if found.n_rows else "no losses of validation rows"
    return f"{start}, the largest budget of both, from {found.n_seeds} seeds and {rows}."


def _of_difference(found: Difference, confidence: float, needed: Mapping[str, int | None] | None) -> dict[str, Any]:
    return {
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "confidence": confidence,
        "noise_seeds": float(np.sqrt(found.spread.seeds[0])),  # standard errors of the estimate
        "noise_rows": float(np.sqrt(found.spread.rows[0])),
        "n_seeds": found.n_seeds,
        "n_rows": found.n_rows,
        "resolved": found.is_resolved,
        "detectable": detectable(found.spread, confidence) if found.n_seeds > 1 else None,
        "needed": needed,
    }


def _of_ratio(ratio: Ratio, confidence: float) -> dict[str, Any]:
    ends = {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high}
    return {**ends, "confidence": confidence, "extrapolated": ratio.extrapolated}
