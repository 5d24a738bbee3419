"""report.json (docs/study.md): every number of a comparison. Document, figures and page are functions of it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.config.places import check_directory
from ngpt_train.config.validate import mistake
from ngpt_train.core.constants import METRICS
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_atomically, write_json
from ngpt_train.core.recorded import compared, finite
from ngpt_train.core.secrets import redacted
from ngpt_train.study.compare.arms import choose_baseline, found_arms, named_arms
from ngpt_train.study.compare.compared_keys import (
    Absent,
    brought,
    compared_keys,
    is_of_training,
    same,
    value_of,
    without_effect,
)
from ngpt_train.study.compare.given_runs import Gathered, check_comparable
from ngpt_train.study.compare.interactions import interactions
from ngpt_train.study.compare.referee import examine, looked_at
from ngpt_train.study.compare.runs import Arms, Run, common_budgets
from ngpt_train.study.compare.step_times import STEP_TIMES, Times, costs_of
from ngpt_train.study.compare.trials import Arm, Trial, failure, read_arm, unfinished
from ngpt_train.study.compare.versus import versus
from ngpt_train.study.definition import LR, name_of

# Files of a comparison in its directory.
REPORT = "report.json"
WRITTEN = (REPORT, "report.md", "report.html", "figures", STEP_TIMES)
FORMAT = 1


def make_report(
    given: Gathered, found: Arms, tuned: Sequence[str], step_times: Times, audits: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of report.json. Raises ConfigError for an unknown baseline or a single arm, DataError for runs that
    cannot be compared.

    given: choices of the user replace those of the study. found, tuned: from `choose_arms`. audits: the certificates.
    """
    said, metric, confidence, overrides = list(given.notes), metric_of(given, found), given.confidence, given.overrides
    overrides = overrides or {}
    name = choose_baseline(found, given.baseline)
    if len(found) < 2:
        problem = f"compare: all runs belong to one arm, {name}: their configs differ in nothing but seed, budget and"
        fix = "say which are compared with compare.arms=[NAME:PATTERN,NAME:PATTERN]"
        raise mistake(f"{problem} {', '.join(tuned) or 'names'}; {fix}")
    read = read_arms(found, tuned, metric, confidence, given.descent)
    best = {x.name: [t.run for b in x.budgets for t in x.at_best(b).values()] or found[x.name] for x in read.values()}
    # A key with a single value at each budget was chosen by hand, not by tuning.
    varied = {arm: [key for key, of in x.tried.items() if max(map(len, of.values())) > 1] for arm, x in read.items()}
    others = [x for x in read.values() if x.name != name]
    compared = {x.name: versus(x, read[name], best, metric, confidence, step_times) for x in others}
    keys = ("differences", "speedups", "trends", "notes")
    joined = {key: [entry for result in compared.values() for entry in result[key]] for key in keys}
    judged = {x.name: max(x.best) for x in read.values() if x.best}
    for arm, result in compared.items():
        judged |= {arm: max(d["budget"] for d in result["differences"])} if result["differences"] else {}
    crossed, of_crossed = interactions(given.interactions, read, metric, confidence)
    said += [*(note for arm in read.values() for note in arm.notes), *joined["notes"], *of_crossed]
    report: dict[str, Any] = {
        "format": FORMAT,
        "title": given.title,
        "metric": metric,
        "unit": METRICS[metric],
        "confidence": confidence,
        "baseline": name,
        "budgets": sorted({budget for arm in read.values() for budget in arm.best}),
        "arms": {x.name: _of_arm(x, found[x.name], overrides.get(x.name, ())) for x in read.values()},
        "losses": [entry for arm in read.values() for entry in _losses(arm)],
        "failures": [*(of for arm in read.values() for of in _failures(arm)), *map(dict, given.failures)],
        "differences": joined["differences"],
        "speedups": joined["speedups"],
        "trends": joined["trends"],
        "interactions": crossed,
        "verdicts": {arm: result["verdict"] for arm, result in compared.items()},
        "descent": list(map(dict, given.descent)),
        "tuning": [entry for arm in read.values() for entry in _tunings(arm)],
        "curves": [entry for arm in read.values() for entry in _curves(arm, metric)],
        "costs": [costs_of(arm, of_arm, step_times) for arm, of_arm in best.items()],
        "referee": examine(found, varied, given.under_test, best),
        "looked_at": looked_at(found),
        "tuning_of_keys": {arm: _tuning_of_keys(x, judged.get(arm), overrides.get(arm, ())) for arm, x in read.items()},
        "audits": list(map(dict, audits)),
        "commits": sorted({str(r.facts["git_commit"]) for x in found.values() for r in x if r.facts.get("git_commit")}),
        "commands": list(given.commands),
        "notes": list(dict.fromkeys(said)),
    }
    return dict(finite(report))


def metric_of(given: Gathered, found: Arms) -> str:
    """The metric that compares the runs. Raises DataError if there is none, or if it is not the one asked for."""
    comparable = check_comparable([run for of_arm in found.values() for run in of_arm])
    if given.metric == "loss" and comparable != given.metric:
        raise DataError("the runs have different tokenizers, so only bits per byte compares them: metric=bits_per_byte")
    return given.metric or comparable


def read_arms(
    found: Arms, tuned: Sequence[str], metric: str, confidence: float, descent: Sequence[Mapping[str, Any]]
) -> dict[str, Arm]:
    """The arms by name. descent: phases, of descent.json."""
    budgets, read = common_budgets(found), {}
    for arm, runs in found.items():
        of_arm = [phase for phase in descent if phase["arm"] == arm]
        read[arm] = read_arm(arm, runs, budgets, tuned, metric, confidence, of_arm)
    return read


def longest_compared(given: Gathered, found: Arms, tuned: Sequence[str]) -> dict[str, Run]:
    """A run of each arm at its best values, of its largest budget; of an arm without a loss any run. Raises as
    `make_report`."""
    read = read_arms(found, tuned, metric_of(given, found), given.confidence, given.descent)
    best = {x.name: next(iter(x.at_best(max(x.budgets)).values())).run for x in read.values() if x.budgets}
    return {name: best.get(name, runs[0]) for name, runs in found.items()}


def choose_arms(given: Gathered, patterns: Sequence[str] = ()) -> tuple[Arms, list[str], list[str]]:
    """The ended runs of each arm, the tuned keys, and sentences about left-out runs.

    The arms are the study's, else those of `patterns` (compare.arms), else groups of runs with equal configs. Raises
    ConfigError for a mistake in the patterns, DataError if no run has ended.
    """
    runs, tuned = given.runs, given.tuned
    chosen = [LR] if tuned is None else sorted(tuned)
    reasons = {run.path: unfinished(run) for run in runs}
    ended = {path for path, why in reasons.items() if why is None}
    said = [f"{path} is left out: {why}" for path, why in reasons.items() if why]
    for run in [run for run in runs if run.damaged]:
        lines = f"{run.damaged} line is" if run.damaged == 1 else f"{run.damaged} lines are"
        said.append(f"{run.path / 'metrics.jsonl'}: {lines} cut or damaged, and skipped")
    if not any(failure(run) is None for run in runs if run.path in ended):
        raise DataError("compare: no run has reached the end of its schedule and was validated there")
    found: Arms
    if given.arms is not None:
        found = given.arms
    elif patterns:
        found, others = named_arms(runs, patterns)
        said += [f"{run.path} is left out: compare.arms names it in no arm" for run in others]
    else:
        usable = [run for run in runs if run.path in ended]
        found = found_arms(usable, chosen)
        if len(found) == 1 and tuned is None:
            found, chosen = found_arms(usable, []), []
    found = {name: [run for run in of_arm if run.path in ended] for name, of_arm in found.items()}
    said += [f"{name} has no run that has ended" for name, of_arm in found.items() if not of_arm]
    return {name: of_arm for name, of_arm in found.items() if of_arm}, chosen, said


def write_reports(report: Mapping[str, Any], out: Path, step_times: Times | None = None) -> None:
    """Writes report.json, report.md, report.html, figures/ and the measured step times into the directory `out`, in
    place of an earlier comparison's."""
    from ngpt_train.study.compare.output.charts import write_figures
    from ngpt_train.study.compare.output.comparison_page import html
    from ngpt_train.study.compare.output.document import document

    report = redacted(report)  # for the page and the document, too
    write_json(out / REPORT, report)
    if step_times:
        write_json(out / STEP_TIMES, {"arms": step_times})
    captions = write_figures(report, out / "figures")
    text = document(report, {f"figures/{name}.png": said for name, said in captions.items()})
    write_atomically(out / "report.md", text.encode())
    write_atomically(out / "report.html", html(report).encode())


def check_out(out: Path) -> None:
    """Raises ConfigError if the report cannot be written into `out`, or would replace files that no comparison has
    written."""
    setting = f"compare.out={out}"
    check_directory(setting, out)
    there = [name for name in WRITTEN if (out / name).exists()]
    if not there:
        return
    try:
        earlier = read_json(out / REPORT)
    except DataError:
        earlier = None
    if not (isinstance(earlier, dict) and "format" in earlier and "verdicts" in earlier):
        fix = "Name another directory, or remove it"
        raise mistake(f"{setting}: {out / there[0]} is not of an earlier compare", fix)


MOST_POINTS = 200  # of a training curve
CURVE = {"step": "step", "tokens": "tokens", "flops": "flops", "seconds": "train_seconds"}  # name -> key of a record


def _of_arm(arm: Arm, runs: Sequence[Run], overrides: Sequence[str]) -> dict[str, Any]:
    largest = max(arm.best, default=None)
    state = arm.state(largest)
    return {
        "runs": [str(run.path) for run in runs],
        "tuned": state == "bracketed",
        "best": {} if largest is None else dict(arm.best[largest]),
        "overrides": list(overrides),
        "state": state,
        "best_by_budget": {str(budget): dict(values) for budget, values in sorted(arm.best.items())},
    }


def _tuning_of_keys(arm: Arm, budget: int | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Keys of optimizer, schedule, batch and initialisation at a budget, with their values.

    tuned: several values were tried, at this budget or, of a further key, at another one, which tuned_elsewhere says.
    chosen: set by the arm's definition, or different from its recipe. not_tuned: all others with an effect.
    """
    found: dict[str, Any] = {"budget": budget, "tuned": {}, "tuned_elsewhere": {}, "chosen": {}, "not_tuned": {}}
    for key, tried in sorted(arm.tried.items(), key=lambda of: (of[0] != LR, of[0])):
        several = [at for at, values in tried.items() if len(values) > 1 and (at == budget or key != LR)]
        if several:
            at = budget if budget in several else max(several)
            numbers = all(type(value) in (int, float) for value in tried[at])
            found["tuned"][key] = sorted(tried[at], key=None if numbers else repr)
            found["tuned_elsewhere"] |= {key: at} if at != budget else {}
    if budget is None:
        return found
    config = next(iter(arm.at_best(budget).values())).run.config
    named = set(map(name_of, overrides))
    passed_over = {*found["tuned"], *without_effect(config)}
    for key in [key for key in compared_keys([config]) if is_of_training(key) and key not in passed_over]:
        value, usual = value_of(config, key), brought(config, key)
        by_hand = key in named or not (isinstance(usual, Absent) or same(value, usual))
        if by_hand or not (value is None or isinstance(value, Absent)):
            found["chosen" if by_hand else "not_tuned"][key] = value
    return found


def _losses(arm: Arm) -> list[dict[str, Any]]:
    ended = [(x, x.run.evals[-1].get("rows_hash")) for x in arm.trials if x.loss is not None]
    return [{**_point(x), "loss": x.loss, "rows_hash": rows, "step": x.run.steps} for x, rows in ended]


def _failures(arm: Arm) -> list[dict[str, Any]]:
    return [{**_point(trial), "reason": trial.reason} for trial in arm.trials if trial.loss is None]


def _point(trial: Trial) -> dict[str, Any]:
    where = {"arm": trial.arm, "budget": trial.budget, "seed": trial.seed}
    return {**where, "values": dict(trial.values), "run": str(trial.run.path)}


def _tunings(arm: Arm) -> list[dict[str, Any]]:
    """The tuning of each key at each budget, with the other keys at their best values."""
    entries = []
    for (budget, key), tuning in sorted(arm.tunings.items()):
        best = dict(arm.best.get(budget, ()))
        points = [
            {"value": dict(trial.values)[key], "loss": trial.loss, "seed": trial.seed, "failed": trial.loss is None}
            for trial in arm.trials
            if trial.budget == budget and all(v == best.get(k, v) for k, v in trial.values if k != key)
        ]
        found = {"state": tuning.state, "points": points, "optimum": tuning.optimum, "low": tuning.low}
        found |= {"high": tuning.high, "price_of_two": tuning.price_of_two, "price_of_grid": tuning.price_of_grid}
        entries.append({"arm": arm.name, "budget": budget, "key": key, **found})
    return entries


def _curves(arm: Arm, metric: str) -> list[dict[str, Any]]:
    entries = []
    for trial in arm.trials:
        evals = [record for record in trial.run.evals if compared(record, metric) is not None]
        train = [x for x in trial.run.train if None not in (x.get("loss"), x.get("tokens"))]
        train = train[:: max(1, math.ceil(len(train) / MOST_POINTS))]
        columns = {name: [record.get(key) for record in evals] for name, key in CURVE.items()}
        columns["loss"] = [compared(record, metric) for record in evals]
        is_best = trial.loss is not None and trial.values == arm.best.get(trial.budget)
        of_train = {name: [record[name] for record in train] for name in ("tokens", "loss")}
        entries.append({**_point(trial), "best": is_best, "eval": columns, "train": of_train})
    return entries
