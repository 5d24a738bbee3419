"""The report of a comparison: report.json, from which the document, the figures and the page are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.core.secrets import redacted
from ngpt_train.study.compare import clocks, entries
from ngpt_train.study.compare.arms import LR, Arms, choose_baseline, found_arms, named_arms
from ngpt_train.study.compare.referee import check_comparable, examine, looked_at
from ngpt_train.study.compare.runs import Run, common_budgets
from ngpt_train.study.compare.step_times import FILE as STEP_TIMES
from ngpt_train.study.compare.trials import failure, read_arm, unfinished
from ngpt_train.study.compare.versus import StepTimes, versus

FORMAT = 1
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}


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
    step_times: StepTimes | None = None,
    audits: Sequence[Mapping[str, Any]] = (),
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of report.json (docs/study.md). Raises ConfigError for a mistake in how arms are named, DataError for
    runs that cannot be compared.

    arms: the runs of each, as a study knows them; else by `patterns` as in compare.arms, else by what their configs
    differ in. tuned: keys whose best value is taken for each arm and budget; None: optim.lr, unless nothing else
    differs.
    metric: None takes the one in which all runs are comparable. failures: of points that left no run behind.
    step_times: of the arms, as `step_times.py` measures them.
    """
    said = list(notes)
    found, tuned, more = choose_arms(runs, arms, patterns, tuned)
    said += more
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
    # A key with one value was chosen by somebody, and not by tuning.
    searched = [key for key in tuned if all(any(k == key for _, k in x.searched) for x in read.values())]
    compared = {
        arm: versus(of_arm, read[name], found, metric, confidence, step_times or {})
        for arm, of_arm in read.items()
        if arm != name
    }
    judged = {
        arm: max(d["budget"] for d in result.differences) for arm, result in compared.items() if result.differences
    }
    judged = {x.name: max(x.best) for x in read.values() if x.best} | judged
    best = {x.name: [t.run for b in x.budgets for t in x.at_best(b).values()] or found[x.name] for x in read.values()}
    said += [note for arm in read.values() for note in arm.notes]
    said += [note for result in compared.values() for note in result.notes]
    report: dict[str, Any] = {
        "format": FORMAT,
        "title": title,
        "metric": metric,
        "unit": UNITS[metric],
        "confidence": confidence,
        "baseline": name,
        "budgets": sorted({budget for arm in read.values() for budget in arm.best}),
        "arms": {x.name: entries.of_arm(x, found[x.name], (overrides or {}).get(x.name, ())) for x in read.values()},
        "losses": [entry for arm in read.values() for entry in entries.losses(arm)],
        "failures": [*(entry for arm in read.values() for entry in entries.failures(arm)), *map(dict, failures)],
        "differences": [entry for result in compared.values() for entry in result.differences],
        "speedups": [entry for result in compared.values() for entry in result.speedups],
        "trends": [entry for result in compared.values() for entry in result.trends],
        "verdicts": {arm: result.verdict for arm, result in compared.items()},
        "tuning": [entry for arm in read.values() for entry in entries.tunings(arm)],
        "curves": [entry for arm in read.values() for entry in entries.curves(arm, metric)],
        "costs": [clocks.costs_of(arm, of_arm, step_times or {}) for arm, of_arm in found.items()],
        "referee": examine(found, searched, under_test, best),
        "looked_at": looked_at(found),
        "tuning_of_keys": {
            x.name: entries.tuning_of_keys(x, judged.get(x.name), (overrides or {}).get(x.name, ()))
            for x in read.values()
        },
        "audits": list(map(dict, audits)),
        "commits": sorted({str(r.facts["git_commit"]) for x in found.values() for r in x if r.facts.get("git_commit")}),
        "commands": list(commands),
        "notes": list(dict.fromkeys(said)),
    }
    return dict(entries.finite(report))


def choose_arms(
    runs: Sequence[Run],
    arms: Mapping[str, Sequence[Run]] | None = None,
    patterns: Sequence[str] = (),
    tuned: Collection[str] | None = None,
) -> tuple[Arms, list[str], list[str]]:
    """The runs of each arm that have ended, the tuned keys, and sentences about runs that are left out."""
    said: list[str] = []
    chosen = [LR] if tuned is None else sorted(tuned)
    ended = {run.path for run in runs if unfinished(run) is None}
    said += [f"{run.path} is left out: {why}" for run in runs if (why := unfinished(run))]
    said += [_damaged(run) for run in runs if run.damaged]
    if not any(failure(run) is None for run in runs if run.path in ended):
        raise DataError("compare: no run has reached the end of its schedule and was validated there")
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
    return {name: of_arm for name, of_arm in found.items() if of_arm}, chosen, said


def _damaged(run: Run) -> str:
    lines = f"{run.damaged} line is" if run.damaged == 1 else f"{run.damaged} lines are"
    return f"{run.path / 'metrics.jsonl'}: {lines} cut or damaged, and skipped"


def write_reports(report: Mapping[str, Any], out: Path, step_times: StepTimes | None = None) -> None:
    """Writes the report into the directory `out`, which is there: report.json, report.md, report.html, figures/, and
    the step times that were measured. What an earlier comparison wrote is replaced."""
    from ngpt_train.study.compare.output.charts import write_figures
    from ngpt_train.study.compare.output.comparison_page import write_page
    from ngpt_train.study.compare.output.document import write_document

    report = redacted(report)  # for the page and the document, too
    write_json(out / "report.json", report)
    if step_times:
        write_json(out / STEP_TIMES, {"arms": step_times})
    captions = write_figures(report, out / "figures")
    write_document(report, out / "report.md", {f"figures/{name}.png": said for name, said in captions.items()})
    write_page(report, out / "report.html")
