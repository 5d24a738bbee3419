"""What a reader must know before the first number: what was compared and what was not tuned, and what the referee found
and looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngpt_train.report.rounded import number, percent, si
from ngpt_train.study.compare.output.wording import Report, is_tuned
from ngpt_train.study.compare.referee import BROUGHT

NO_CONFOUNDS = "No confounds were found between the arms in what was looked at."


def facts(report: Report) -> list[str]:
    """What was compared."""
    seeds = len({entry["seed"] for entry in report["losses"]})
    budgets = sorted(report["budgets"])
    span = " to ".join(si(budget) for budget in dict.fromkeys(budgets[:1] + budgets[-1:]))
    return [
        f"{len(report['arms'])} arms, baseline {report['baseline']}",
        f"{len(budgets)} budget{'s' * (len(budgets) != 1)}, {span} tokens",
        f"{seeds} seed{'s' * (seeds != 1)}",
        f"{report['metric'].replace('_', ' ')} in {report['unit']}",
        f"{percent(report['confidence'])} intervals",
    ]


def cautions(report: Report) -> list[str]:
    """What a reader must know before the first number."""
    n_seeds = len({entry["seed"] for entry in report["losses"]})
    said = []
    if n_seeds == 1:
        said.append("One seed: the noise between seeds is unknown, and nothing here is resolved.")
    if len(report["budgets"]) == 1:
        said.append("One budget: how the difference changes with the budget is unknown.")
    said += _lost(report)
    failed = [str(audit["run"]) for audit in report["audits"] if audit_says(audit) != "equal"]
    if failed:
        said.append(
            f"Audit: training again does not give what is on record, or gave it of other records: {', '.join(failed)}."
        )
    untuned = [arm for arm in report["arms"] if not is_tuned(report, arm)]
    if untuned:
        said.append(f"Untuned: {', '.join(untuned)}. The loss of an untuned arm is a bound.")
    return said


def _lost(report: Report) -> list[str]:
    """Of the arms that have been tried at a budget, and have no loss there."""
    without = dict.fromkeys(x["arm"] for x in report["failures"] if x["arm"] not in report["arms"])
    said = [f"No run of {arm} has ended, because runs failed." for arm in without]
    for arm, budget in dict.fromkeys((x["arm"], x["budget"]) for x in report["failures"] if x["budget"] is not None):
        if arm not in without and str(budget) not in report["arms"][arm]["best_by_budget"]:
            failed, ended = (
                sum((x["arm"], x["budget"]) == (arm, budget) for x in report[name]) for name in ("failures", "losses")
            )
            runs = f"{failed} of its {failed + ended} runs there failed"
            said.append(
                f"No comparison of {arm} at {si(budget)} tokens: {runs}. A failure counts as worse than any loss."
            )
    return said


SHOWN = 24  # characters of a value in a sentence; the table has all


def confound(entry: Mapping[str, Any]) -> str:
    """Where the values of a key differ, and by how much: `(gpt, ngpt: 0.1 | 0.3, 3 times; the recipe brings 0)`."""
    arms, texts = arms_and_values(entry)
    values = " | ".join(text if len(text) <= SHOWN else f"{text[:SHOWN]}…" for text in texts)
    size = f", {size_text(entry['size'])}" if entry["size"] is not None else ""
    note = f"; {entry['note']}" if entry["note"] else ""
    return f"({', '.join(arms)}: {values}{size}{note})"


FEW = 6  # arms whose values a cell can list one by one


def arms_and_values(entry: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The arms and values of a difference; of many arms those with the commonest value stand last, as how many."""
    arms, values = list(entry["arms"]), list(map(value_text, entry["values"]))
    common = max(values, key=values.count, default="")
    n_common = values.count(common)
    if len(arms) <= FEW or len(values) != len(arms) or n_common < FEW:
        return arms, values
    differ = [(arm, value) for arm, value in zip(arms, values, strict=True) if value != common]
    return [*(arm for arm, _ in differ), f"{n_common} others"], [*(value for _, value in differ), common]


def value_text(value: Any) -> str:
    return f"{value:.6g}" if type(value) is float else str(value)


def confounds(report: Report) -> list[Mapping[str, Any]]:
    return [entry for entry in report["referee"] if entry["kind"] == "confound"]


def looked_at(report: Report) -> list[str]:
    """What the referee compared, what differs without being a confound, what it cannot see, and what was not tuned."""
    seen = report["looked_at"]
    follows = [entry for entry in report["referee"] if entry["kind"] == "follows"]
    brought = _keys([entry for entry in follows if entry["note"] == BROUGHT])
    others = [key for key in _keys(follows) if key not in brought]
    said = [
        f"The referee compared {seen['keys']} keys of the config and {len(seen['facts'])} facts of run.json "
        f"({', '.join(seen['facts'])}). It cannot see what no key and no fact says, such as a number in the code."
    ]
    if brought or seen["options"]:
        options = f"{len(seen['options'])} options that not every architecture has" * bool(seen["options"])
        keys = f"{len(brought)} key{'s' * (len(brought) != 1)} that differ ({', '.join(brought)})" * bool(brought)
        said.append(f"With the architectures and their recipes come {' and '.join(filter(None, [keys, options]))}.")
    if others:
        said.append(f"What else differs and is no confound: {', '.join(others)}.")
    return [*said, _untuned_keys(report)]


def _keys(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(entry["key"] for entry in entries))


def _untuned_keys(report: Report) -> str:
    baseline = report["baseline"]
    of_baseline = report["tuning_of_keys"][baseline]
    tuned = ", ".join(of_baseline["tuned"]) or "no key"
    n = len(of_baseline["not_tuned"]) + len(of_baseline["chosen"])
    return (
        f"Of {baseline}, the baseline, {tuned} was tuned here, and {n} keys of optimizer, schedule, batch and "
        "initialisation were not. An untuned key of the baseline may be worth more than the difference."
    )


def size_text(size: Any) -> str:
    """Of a difference that the referee found: a number is the ratio of the values."""
    if type(size) not in (int, float):
        return str(size)
    digits = next((n for n in (3, 4, 5, 6, 7) if float(f"{size:.{n}g}") != 1), 3)  # 1.0001 times is not once
    return f"{number(size, None, digits)} times"


def audit_says(audit: Mapping[str, Any]) -> str:
    """What the certificate of a run says of its records as they are now."""
    if not audit["valid"]:
        return "outdated" if not audit["note"] else "unreadable"
    return "equal" if audit["equal"] else "not equal"
