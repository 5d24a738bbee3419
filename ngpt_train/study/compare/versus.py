"""An arm against the baseline: the difference at equal tokens, the cost at equal loss, and the verdict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ngpt_train.config.validate import show
from ngpt_train.study.compare.equal_loss import Ratio, annealed_ratio, log_ratio, trend_of, within_schedule
from ngpt_train.study.compare.intervals import Difference, detectable, difference_at, needed
from ngpt_train.study.compare.noise import Noise, Pair
from ngpt_train.study.compare.phrases import BY_OWN_CLOCKS, MEASURED, OWN, OWN_NOISE
from ngpt_train.study.compare.runs import Arms
from ngpt_train.study.compare.step_times import Costs, Times, costs_between, in_units
from ngpt_train.study.compare.trials import UNTUNED, Arm, pair_of

ONE_SEED = "one seed: the interval is without the noise between seeds"


def versus(arm: Arm, baseline: Arm, runs: Arms, metric: str, confidence: float, step_times: Times) -> dict[str, Any]:
    """The arm's `verdict`, `differences`, `speedups` and `trends` (one at most) in report.json, and `notes`. runs: of
    each arm, by its name, those whose cost counts."""
    pair, notes = pair_of(arm, baseline, metric)
    for x in (arm, baseline):
        notes += [_why_no_loss(x, budget) for budget in sorted({t.budget for t in x.trials} - set(x.best))]
    result: dict[str, Any] = {"differences": [], "speedups": [], "trends": [], "notes": notes}
    if pair is None:
        return result | {"verdict": verdict(arm.state(None), baseline.state(None), None)}
    noise = Noise(pair)
    if len(pair.budgets) > 1 and noise.difference_df:
        notes += [OWN_NOISE, *_noise_by_budget(pair, arm.name, baseline.name)]
    found = [difference_at(pair, noise, at, confidence) for at in range(len(pair.budgets))]
    annealed = [annealed_ratio(pair, noise, at, confidence) for at in range(len(pair.budgets))]
    of_schedule = _within_schedule(arm, baseline, metric, confidence)
    last, names = int(pair.budgets[-1]), {"arm": arm.name, "baseline": baseline.name}
    steady = replace(pair, unstable=None)
    at_compared = difference_at(steady, Noise(steady), len(pair.budgets) - 1, confidence)
    word = verdict(arm.state(last), baseline.state(last), found[-1], at_compared)
    notes += [why(word, arm, baseline, last, found[-1]), *_divergences(arm, baseline, last)]
    costs = costs_between(arm.name, baseline.name, runs, step_times)
    counted: list[Ratio] = []  # for the trend: not at budgets with an untuned arm
    for at, budget in enumerate(map(int, pair.budgets)):
        steps = next(iter(arm.at_best(budget).values())).run.steps
        missing = None if found[at].is_resolved else needed(pair, found[at], at, steps, confidence)
        entry = _of_difference(found[at], confidence, missing)
        entry |= dict(zip(("price_baseline", "price_arm"), map(float, noise.prices[at, :, 0]), strict=True))
        result["differences"].append({**names, "budget": budget, **entry})
        ratios = {"annealed": annealed[at]}
        ratios |= {"within_schedule": of_schedule[budget]} if budget in of_schedule else {}
        untuned = [f"{x.name} is untuned at this budget" for x in (arm, baseline) if x.state(budget) in UNTUNED]
        counted.append(Ratio(None, None, None) if untuned else annealed[at])
        for how, ratio in ratios.items():
            alone = found[at].n_seeds == 1 and how == "annealed" and ratio.low is not None
            for entry in _in_all_units(ratio, costs, confidence, [*untuned, ONE_SEED] if alone else untuned):
                result["speedups"].append({**names, "how": how, "budget": budget, **entry})
    if trend := trend_of(pair, noise, counted, confidence):
        result["trends"] = [{**names, **asdict(trend), "confidence": confidence}]
    return result | {"verdict": word}


def _noise_by_budget(pair: Pair, arm: str, baseline: str) -> list[str]:
    """A note on the noise of each budget, if two have several seeds."""
    by_budget = zip(pair.budgets, pair.difference, pair.n_seeds, strict=True)
    several = [f"{np.nanstd(x, ddof=1):.2g} at {int(budget):,} tokens" for budget, x, n in by_budget if n > 1]
    if len(several) < 2:
        return []
    return [f"{arm} less {baseline}, standard deviation of the difference between seeds: {', '.join(several)}."]


def _why_no_loss(arm: Arm, budget: int) -> str:
    runs = [trial for trial in arm.trials if trial.budget == budget]
    failed = sum(trial.loss is None for trial in runs)
    why = f"{failed} of {len(runs)} runs failed, and there is no value with which all seeds ended"
    return f"{arm.name} has no loss at {budget:,} tokens, and is not compared there: {why}."


def _in_all_units(ratio: Ratio, costs: Costs, confidence: float, notes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The ratio by tokens, FLOPs and seconds. Step times measured in turn are preferred to the runs' own clocks, which
    then stand in the note."""
    own = costs.get(("seconds", OWN))
    for (unit, clock), cost in costs.items():
        if clock == OWN and ("seconds", MEASURED) in costs:
            continue
        found, beside = in_units(ratio, cost, confidence), None
        if clock == MEASURED and own and ratio.estimate:
            beside = f"{BY_OWN_CLOCKS} {own.ratio * ratio.estimate:.3g}"
        ends = {"estimate": found.estimate, "low": found.low, "high": found.high}
        note = "; ".join(filter(None, [*notes, found.note, beside])) or None
        how = {"confidence": confidence, "extrapolated": found.extrapolated, "unit": unit, "clock": clock}
        yield {**ends, **how, "note": note}


def _within_schedule(arm: Arm, baseline: Arm, metric: str, confidence: float) -> dict[int, Ratio]:
    """By budget, if the runs of a seed were validated before their end."""
    logs = {}
    for budget in sorted(set(arm.best) & set(baseline.best)):
        ones, others = arm.at_best(budget), baseline.at_best(budget)
        found = [log_ratio(ones[s].run.evals, others[s].run.evals, metric) for s in ones if s in others]
        if known := [x for x in found if x is not None]:
            logs[budget] = known
    return within_schedule(logs, confidence) if logs else {}


def verdict(arm: str, baseline: str, found: Difference | None, at_compared: Difference | None = None) -> str:
    """The verdict at equal tokens, from the largest budget of both arms. arm, baseline: their states.

    untuned: the best value of one is at the edge of the tried values, one has a key that was tuned at another budget
    alone, or only one of the two was tuned. divergence: a difference is resolved, but values at which a seed diverges
    may be its only reason. at_compared: the difference as if there were none."""
    states = {arm, baseline}
    if states & {*UNTUNED} or len(states) > 1:
        return "untuned"
    if found is None or not found.is_resolved:
        return "divergence" if at_compared is not None and at_compared.is_resolved else "not_resolved"
    return "better" if found.estimate < 0 else "worse"


def _divergences(arm: Arm, baseline: Arm, budget: int) -> Iterator[str]:
    """A sentence for each arm that diverges for a seed at a better value than the compared one."""
    for x in (arm, baseline):
        if (known := x.divergences.get(budget)) is not None:
            best, compared = (", ".join(f"{k}={show(v)}" for k, v in of) for of in (known.values, x.best[budget]))
            seeds = f"seed{'s' * (len(known.seeds) > 1)} {', '.join(map(str, known.seeds))}"
            yield (
                f"With {best} {x.name} diverges for {seeds} of {known.n_seeds}, and ends {known.price[0]:.2g} lower "
                f"for the others than with {compared}, the best at which all seeds end, which is compared."
            )


def why(word: str, arm: Arm, baseline: Arm, budget: int, found: Difference) -> str:
    """The reason for the verdict, a sentence."""
    start = f"{arm.name} against {baseline.name}: {word.replace('_', ' ')} at {budget:,} tokens"
    if word == "untuned":
        tuned = {
            "edge": "not tuned to an optimum inside its grid",
            "elsewhere": "tuned in some keys at another budget alone",
            "not tried": "not tuned",
        }
        states = [f"{x.name} is {tuned.get(x.state(budget), 'tuned')}" for x in (arm, baseline)]
        return f"{start}, because {' and '.join(states)}."
    if word == "divergence":
        return f"{start}: the difference may come from a seed that diverges."
    if found.n_seeds < 2:
        return f"{start}, because one seed does not show the noise between seeds."
    rows = f"{found.n_rows} validation rows" if found.n_rows else "no losses of validation rows"
    return f"{start}, the largest budget of both, from {found.n_seeds} seeds and {rows}."


def _of_difference(found: Difference, confidence: float, needed: Mapping[str, int | None] | None) -> dict[str, Any]:
    """noise_seeds, noise_rows: standard errors of the estimate."""
    ends = {"estimate": found.estimate, "low": found.low, "high": found.high, "confidence": confidence}
    seeds, rows = (float(np.sqrt(variances[0])) for variances in (found.spread.seeds, found.spread.rows))
    counts = {"n_seeds": found.n_seeds, "n_rows": found.n_rows, "resolved": found.is_resolved}
    least = detectable(found.spread, confidence) if found.n_seeds > 1 else None
    return {**ends, "noise_seeds": seeds, "noise_rows": rows, **counts, "detectable": least, "needed": needed}
