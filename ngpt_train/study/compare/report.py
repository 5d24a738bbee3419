"""The report of a comparison: report.json, from which the document, the figures and the page are made."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.study.compare import clocks
from ngpt_train.study.compare.arms import LR, Arms, choose_baseline, common_budgets, found_arms, named_arms
from ngpt_train.study.compare.statistics.intervals import Difference, Noise, Pair, difference_at
from ngpt_train.study.compare.statistics.matched import Ratio, annealed_ratio
from ngpt_train.study.compare.statistics.power import detectable, needed
from ngpt_train.study.compare.referee import check_comparable, examine
from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.trials import Arm, failure, is_number, pair_of, read_arm, unfinished
from ngpt_train.study.compare.within import within_schedule

FORMAT = 1
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
MOST_POINTS = 200  # of a training curve


def make_report(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    arms: Mapping[str, Sequence[Run]] | None = None,
    patterns: Sequence[str] = (),
    tuned: Collection[str] | None = None,
    under_test: Collection[str] = (),
    overrides: Mapping[str, Sequence[str]] | None = None,
    metric: str | None = None,
    confidence: float = 0.95,
    title: str = "comparison",
    failures: Sequence[Mapping[str, Any]] = (),
    step_times: Mapping[str, Mapping[str, Any]] | None = None,
    audits: Sequence[Mapping[str, Any]] = (),
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of report.json (docs/study.md). Raises ConfigError for a mistake in how arms are named, DataError for
    runs that cannot be compared.

    arms: the runs of each, as a study knows them; else by `patterns` as in compare.arms, else by what their configs
    differ in. tuned: keys whose best value is taken for each arm and budget; None: optim.lr, unless nothing else differs.
    metric: None takes the one in which all runs are comparable. failures: of points that left no run behind.
    step_times: of the arms, as `step_times.py` measures them.
    """
    said = list(notes)
    step_times = step_times or {}
    found, tuned = _arms(runs, arms, patterns, tuned, said)
    comparable = check_comparable([run for of_arm in found.values() for run in of_arm])
    if metric == "loss" and comparable != metric:
        raise DataError("the runs have different tokenizers, so only bits per byte compares them: metric=bits_per_byte")
    metric = metric or comparable
    name = choose_baseline(found, baseline)
    if len(found) < 2:
        raise mistake(
            f"compare: all runs belong to one arm, {name}: their configs differ in nothing but seed, budget and "
            f"{', '.join(tuned) or 'names'}; say which are compared with compare.arms=[NAME:PATTERN,NAME:PATTERN]"
        )
    budgets = common_budgets(found)
    read = {arm: read_arm(arm, of_arm, budgets, tuned, metric, confidence) for arm, of_arm in found.items()}
    report: dict[str, Any] = {
        "format": FORMAT,
        "title": title,
        "metric": metric,
        "unit": UNITS[metric],
        "confidence": confidence,
        "baseline": name,
        "budgets": sorted({budget for arm in read.values() for budget in arm.best}),
        "arms": {arm.name: _arm(arm, found[arm.name], (overrides or {}).get(arm.name, ())) for arm in read.values()},
        "losses": [entry for arm in read.values() for entry in _losses(arm)],
        "failures": [*(entry for arm in read.values() for entry in _failures(arm)), *map(dict, failures)],
        "differences": [],
        "speedups": [],
        "verdicts": {},
        "tuning": [entry for arm in read.values() for entry in _tuning(arm)],
        "curves": [entry for arm in read.values() for entry in _curves(arm, metric)],
        "costs": [clocks.costs_of(arm, of_arm, step_times) for arm, of_arm in found.items()],
        "referee": examine(found, tuned, under_test),
        "audits": list(map(dict, audits)),
        "commits": sorted({str(r.facts["git_commit"]) for x in found.values() for r in x if r.facts.get("git_commit")}),
        "commands": list(commands),
    }
    for arm in read.values():
        if arm.name != name:
            _compare(arm, read[name], found, step_times, report, said)
    report["notes"] = list(dict.fromkeys(said))
    return dict(_finite(report))


def _arms(
    runs: Sequence[Run],
    arms: Mapping[str, Sequence[Run]] | None,
    patterns: Sequence[str],
    tuned: Collection[str] | None,
    said: list[str],
) -> tuple[Arms, list[str]]:
    """The runs of each arm that have ended, and the tuned keys."""
    chosen = [LR] if tuned is None else sorted(tuned)
    ended = {run.path for run in runs if unfinished(run) is None}
    said += [f"{run.path} is left out: {why}" for run in runs if (why := unfinished(run))]
    if not any(failure(run) is None for run in runs if run.path in ended):
        raise DataError(
            "compare: no run has reached the end of its schedule with a validation there, which is compared"
        )
    if arms is not None:
        found = {name: list(of_arm) for name, of_arm in arms.items()}
    elif patterns:
        found, others = named_arms(runs, patterns)
        said += [f"{run.path} is left out: compare.arms names it in no arm" for run in others]
    else:
        usable = [run for run in runs if run.path in ended]
        found = found_arms(usable, chosen)
        if len(found) == 1 and tuned is None:
            chosen = []
            found = found_arms(usable, chosen)
    found = {name: [run for run in of_arm if run.path in ended] for name, of_arm in found.items()}
    said += [f"{name} has no run that has ended" for name, of_arm in found.items() if not of_arm]
    return {name: of_arm for name, of_arm in found.items() if of_arm}, chosen


def _compare(
    arm: Arm,
    baseline: Arm,
    runs: Arms,
    step_times: Mapping[str, Mapping[str, Any]],
    report: dict[str, Any],
    said: list[str],
) -> None:
    """Adds the differences, the speed-ups and the verdict of an arm."""
    pair, notes = pair_of(arm, baseline, report["metric"])
    said += notes
    names = {"arm": arm.name, "baseline": baseline.name}
    found: list[Difference] = []
    if pair is not None:
        noise, confidence = Noise(pair), report["confidence"]
        if len(pair.budgets) > 1:
            said.append("The noise between seeds is pooled over budgets, which are runs of their own.")
        of_arm, of_baseline = runs[arm.name], runs[baseline.name]
        own, in_turn = clocks.own_clock(of_arm, of_baseline), clocks.measured(step_times, arm.name, baseline.name)
        costs = {"tokens": clocks.Cost(1.0), "flops": clocks.flops(of_arm, of_baseline), "seconds": in_turn or own}
        of_schedule = within_schedule(arm, baseline, report["metric"], confidence)
        for at, budget in enumerate(map(int, pair.budgets)):
            found.append(difference_at(pair, noise, at, confidence))
            steps = next(iter(arm.at_best(budget).values())).run.steps
            report["differences"].append(
                {**names, "budget": budget, **_difference(found[-1], pair, at, steps, confidence)}
            )
            ratios = {"annealed": annealed_ratio(pair, noise, at, confidence)}
            if budget in of_schedule:
                ratios["within_schedule"] = of_schedule[budget]
            for how, ratio in ratios.items():
                for unit, cost in costs.items():
                    if cost is not None:
                        converted = clocks.in_units(ratio, cost, confidence)
                        clock, note = None, [converted.note] if converted.note else []
                        if unit == "seconds":
                            clock = clocks.MEASURED if in_turn else clocks.OWN
                            if in_turn and own and ratio.estimate is not None:
                                note.append(f"by the runs' own clocks {own.ratio * ratio.estimate:.3g}")
                        note += _untuned_note(arm, baseline, budget)
                        report["speedups"].append(
                            {
                                **names,
                                "unit": unit,
                                "how": how,
                                "budget": budget,
                                **_ratio(converted),
                                "confidence": confidence,
                                "clock": clock,
                                "note": "; ".join(note) or None,
                            }
                        )
    last = None if pair is None else int(pair.budgets[-1])
    report["verdicts"][arm.name] = verdict(arm.state(last), baseline.state(last), found[-1] if found else None)
    if found:
        said.append(_why(arm, baseline, last, found[-1], report))


def verdict(arm_state: str, baseline_state: str, found: Difference | None) -> str:
    """Of the largest budget that both arms have, at equal tokens. untuned: an optimum is not inside the values that were
    tried, or only one of the two was tuned at all."""
    states = {arm_state, baseline_state}
    if "edge" in states or len(states) > 1:
        return "untuned"
    if found is None or not found.is_resolved:
        return "not_resolved"
    return "better" if found.estimate < 0 else "worse"


def _why(arm: Arm, baseline: Arm, budget: int | None, found: Difference, report: Mapping[str, Any]) -> str:
    """A sentence on the verdict."""
    word = report["verdicts"][arm.name].replace("_", " ")
    start = f"{arm.name} against {baseline.name}: {word} at {budget:,} tokens"
    if word == "untuned":
        states = f"{arm.name} is {_said(arm.state(budget))}, {baseline.name} is {_said(baseline.state(budget))}"
        return f"{start}, because {states}."
    if found.n_seeds < 2:
        return f"{start}, because one seed does not show the noise between seeds."
    return f"{start}, the largest budget of both, from {found.n_seeds} seeds and {found.n_rows} validation rows."


def _said(state: str) -> str:
    return {"edge": "not tuned to an optimum inside its grid", "not tried": "not tuned"}.get(state, "tuned")


def _untuned_note(arm: Arm, baseline: Arm, budget: int) -> list[str]:
    return [f"{x.name} is untuned at this budget" for x in (arm, baseline) if x.state(budget) == "edge"]


def _difference(found: Difference, pair: Pair, at: int, steps: int, confidence: float) -> dict[str, Any]:
    spread = found.spread
    resolved = found.is_resolved
    return {
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "confidence": confidence,
        "noise_seeds": float(np.sqrt(spread.seeds[0])),
        "noise_rows": float(np.sqrt(spread.rows[0])),
        "n_seeds": found.n_seeds,
        "n_rows": found.n_rows,
        "resolved": resolved,
        "detectable": detectable(spread, confidence) if found.n_seeds > 1 else None,
        "needed": None if resolved else needed(pair, found, at, steps, confidence),
    }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {
        "estimate": ratio.estimate,
        "low": ratio.low,
        "high": ratio.high,
        "extrapolated": ratio.extrapolated,
    }


def _arm(arm: Arm, runs: Sequence[Run], overrides: Sequence[str]) -> dict[str, Any]:
    largest = max(arm.best, default=None)
    state = arm.state(largest)
    return {
        "runs": [str(run.path) for run in runs],
        "tuned": state == "bracketed",
        "best": dict(arm.best[largest]) if largest is not None else {},
        "overrides": list(overrides),
        "state": state,
        "best_by_budget": {str(budget): dict(values) for budget, values in sorted(arm.best.items())},
    }


def _losses(arm: Arm) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm.name,
            "budget": trial.budget,
            "seed": trial.seed,
            "loss": trial.loss,
            "rows_hash": trial.run.evals[-1].get("rows_hash"),
            "values": dict(trial.values),
            "run": str(trial.run.path),
            "step": trial.run.steps,
        }
        for trial in arm.trials
        if trial.loss is not None
    ]


def _failures(arm: Arm) -> list[dict[str, Any]]:
    return [
        {
            "arm": arm.name,
            "budget": trial.budget,
            "seed": trial.seed,
            "values": dict(trial.values),
            "reason": trial.reason,
            "run": str(trial.run.path),
        }
        for trial in arm.trials
        if trial.loss is None
    ]


def _tuning(arm: Arm) -> list[dict[str, Any]]:
    entries = []
    for (budget, key), tuning in sorted(arm.tunings.items()):
        best = dict(arm.best.get(budget, ()))
        points = [
            {"value": dict(t.values)[key], "loss": t.loss, "seed": t.seed, "failed": t.loss is None}
            for t in arm.trials
            if t.budget == budget and all(v == best.get(k, v) for k, v in t.values if k != key)
        ]
        found = {"state": tuning.state, "points": points, "optimum": tuning.optimum, "low": tuning.low}
        found |= {"high": tuning.high, "price_of_two": tuning.price_of_two}
        entries.append({"arm": arm.name, "budget": budget, "key": key, **found})
    return entries


def _curves(arm: Arm, metric: str) -> list[dict[str, Any]]:
    entries = []
    for trial in arm.trials:
        run = trial.run
        evals = [x for x in run.evals if is_number(x.get(metric))]
        columns = {"step": "step", "tokens": "tokens", "flops": "flops", "seconds": "train_seconds", "loss": metric}
        train = [x for x in run.train if is_number(x.get("loss")) and is_number(x.get("tokens"))]
        train = train[:: max(1, math.ceil(len(train) / MOST_POINTS))]
        entries.append(
            {
                "arm": arm.name,
                "budget": trial.budget,
                "seed": trial.seed,
                "run": str(run.path),
                "values": dict(trial.values),
                "best": trial.loss is not None and trial.values == arm.best.get(trial.budget),
                "eval": {name: [x.get(column) for x in evals] for name, column in columns.items()},
                "train": {"tokens": [x["tokens"] for x in train], "loss": [x["loss"] for x in train]},
            }
        )
    return entries


def _finite(value: Any) -> Any:
    """As JSON has it: numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_reports(report: Mapping[str, Any], out: Path) -> None:
    """Writes the report into the directory `out`, which is there: report.json."""
    write_json(out / "report.json", report)


def summary(report: Mapping[str, Any]) -> str:
    """A line for each arm and budget, and the notes."""
    lines = [f"{report['title']}: {report['metric']} in {report['unit']}, baseline {report['baseline']}"]
    for found in report["differences"]:
        interval = "" if found["low"] is None else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
        lines.append(f"  {found['arm']:<16} {found['budget']:>15,} tokens  {found['estimate']:+.4f}{interval}")
    lines += [f"  {arm:<16} {word.replace('_', ' ')}" for arm, word in report["verdicts"].items()]
    return "\n".join([*lines, *report["notes"]])
