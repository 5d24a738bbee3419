"""`compare`: which of several arms is better, by how much and how sure, from the directories of any runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.config.validate import mistake
from ngpt_train.study.compare.gather import check_out, gather, step_times_of
from ngpt_train.study.compare.report import make_report, summary, write_reports


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints the verdicts, and writes the report into compare.out; returns 0.

    Raises ConfigError for a mistake in the arguments, DataError for runs that cannot be read or compared.
    """
    compare = config.compare
    if not compare.runs:
        raise mistake("compare: no run is named", "For example: ngpt-train compare runs/a runs/b compare.out=report")
    out = None if compare.out is None else Path(compare.out).expanduser()
    if out is not None:
        check_out(out)
    found = gather([Path(run).expanduser() for run in compare.runs])
    step_times = step_times_of(found.runs, out, compare.step_times)
    report = make_report(
        found.runs,
        baseline=compare.baseline or found.baseline,
        arms=None if compare.arms else found.arms,
        patterns=compare.arms or (),
        tuned=found.tuned if compare.tuned is None else compare.tuned,
        under_test=compare.under_test or found.under_test,
        overrides=found.overrides,
        metric=compare.metric or found.metric,
        confidence=compare.confidence or found.confidence,
        title=found.title,
        failures=found.failures,
        step_times=step_times,
        commands=[*found.commands, shlex.join(["python", "-m", "ngpt_train", "compare", *compare.runs, *overrides])],
        notes=found.notes,
    )
    print(summary(report))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_reports(report, out)
        print(f"\nwritten to {out}")
    return 0
