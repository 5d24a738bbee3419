"""`compare`: which of several arms is better, by how much and how sure, from the directories of any runs."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.config.arguments import name_of
from ngpt_train.config.places import make_directory
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.studies import CompareConfig
from ngpt_train.config.validate import did_you_mean, mistake, show, similar_keys
from ngpt_train.core.errors import ConfigError
from ngpt_train.core.secrets import command_of
from ngpt_train.study.audit.certificate import read_certificates
from ngpt_train.study.compare import step_times
from ngpt_train.study.compare.compared_keys import covers
from ngpt_train.study.compare.comparison import check_out, choose_arms, longest_compared, make_report, write_reports
from ngpt_train.study.compare.given_runs import gather
from ngpt_train.study.compare.output.document import console
from ngpt_train.study.compare.runs import Run

logger = logging.getLogger(__name__)


def main(config: Config, overrides: Sequence[str], measures: bool = False) -> int:
    """Prints the verdicts, and writes the report into compare.out; returns 0.
    measures: step times, where compare.out does not have those of all arms.

    Raises ConfigError for a mistake in the arguments, DataError for runs that cannot be read or compared.
    """
    if unused := [name for name in map(name_of, overrides) if name.partition(".")[0] not in ("compare", "experiment")]:
        logger.info("compare makes no use of %s", ", ".join(unused))
    out = None if config.compare.out is None else Path(config.compare.out).expanduser()
    report, times = compared(config, overrides, measures)
    print(console(report))
    if out is not None:
        make_directory(f"compare.out={out}", out)
        write_reports(report, out, times)
        print(f"\nwritten to {out}")
    return 0


def compared(
    config: Config, overrides: Sequence[str], measures: bool = False
) -> tuple[dict[str, Any], step_times.Times]:
    """The content of report.json, and what step_times.json is to hold. Raises as `main`."""
    compare = config.compare
    if not compare.runs:
        raise mistake("compare: no run is named", "For example: ngpt-train compare runs/a runs/b compare.out=report")
    out = None if compare.out is None else Path(compare.out).expanduser()
    if out is not None:
        check_out(out)
    found = gather([Path(run).expanduser() for run in compare.runs])
    check_keys(compare, found.runs)
    given = replace(
        found,
        arms=found.arms if compare.arms is None else None,
        baseline=compare.baseline or found.baseline,
        tuned=found.tuned if compare.tuned is None else compare.tuned,
        under_test=compare.under_test or found.under_test,
        metric=compare.metric or found.metric,
        confidence=compare.confidence or found.confidence,
        commands=[*found.commands, command_of("compare", [*compare.runs, *overrides])],
    )
    arms, tuned, notes = choose_arms(given, compare.arms or ())
    times = _step_times(longest_compared(given, arms, tuned), out, config, measures)
    given.notes = [*given.notes, *notes, *(of["untimed"] for of in times.values() if "untimed" in of)]
    timed = {name: of for name, of in times.items() if "untimed" not in of}
    report = make_report(given, arms, tuned, timed, read_certificates(found.runs))
    return report, times


def check_keys(compare: CompareConfig, runs: Sequence[Run]) -> None:
    """Raises ConfigError for an empty compare.arms, and a key of compare.tuned or under_test that no run has."""
    if compare.arms == []:
        raise mistake("compare.arms=[]: there is no arm", "Leave it out, or name arms, such as [gpt:gpt-*,ngpt:ngpt-*]")
    of_config = {key for run in runs for key in run.config}
    known = of_config | {fact for run in runs for fact in run.facts_by_name}
    for name in compare.tuned or ():
        if name not in of_config:
            raise _unknown("compare.tuned", compare.tuned, name, of_config)
    for name in compare.under_test or ():
        if not any(covers([name], key) for key in known):
            raise _unknown("compare.under_test", compare.under_test, name, known)


def _unknown(of: str, names: Sequence[str] | None, name: str, known: Collection[str]) -> ConfigError:
    problem = f"{of}={show(names)}: no run has the key {name}{did_you_mean(similar_keys(name, sorted(known)))}"
    return mistake(problem, "Name keys of config.yaml, such as optim.lr")


def _step_times(runs: Mapping[str, Run], out: Path | None, own: Config, measures: bool) -> step_times.Times:
    """The step times that an earlier comparison left in `out`, unless they are to be measured `again`. Where some are
    missing, all are measured: steps are timed in turn. runs: one of each arm."""
    again = own.compare.step_times
    known = {} if again or out is None else step_times.stored(out, runs)
    return step_times.measure(runs, own) if again or (measures and known.keys() != runs.keys()) else known
