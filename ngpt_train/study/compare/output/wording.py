"""The sentences of a report before its first number, for report.md, the page, the figures and the console."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ngpt_train.report.rounded import DASH, interval, number, percent, si
from ngpt_train.study.compare.phrases import BROUGHT, OWN_NOISE

Report = Mapping[str, Any]  # report.json

UNITS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
HOW = {"annealed": "between annealed runs", "within_schedule": "within one schedule"}
VERDICTS = {"not_resolved": "not resolved"} | {x: x for x in ("better", "worse", "untuned", "divergence")}


def is_tuned(report: Report, arm: str) -> bool:
    return bool(report["arms"][arm]["tuned"])


def label(report: Report, arm: str) -> str:
    """The arm's name with its stamps in a figure and on a terminal: `powernorm (untuned)`."""
    stamps = [] if is_tuned(report, arm) else ["untuned"]
    word = report["verdicts"].get(arm)
    stamps += [VERDICTS[word]] if word in ("not_resolved", "divergence") else []
    return f"{arm} ({', '.join(stamps)})" if stamps else arm


def marked(report: Report, arm: str) -> str:
    """The arm's name in a table. That it is not resolved is said by the table of verdicts alone."""
    return arm if is_tuned(report, arm) else f"{arm} (untuned)"


def values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={short(value)}" for key, value in values.items())


def short(value: Any, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if type(value) is float else str(value)


def budget_of(report: Report, arm: str) -> int | None:
    """The budget of the arm's verdict: the largest shared with the baseline, else the arm's largest."""
    shared = [d["budget"] for d in report["differences"] if d["arm"] == arm and d["estimate"] is not None]
    return max(shared or map(int, report["arms"][arm]["best_by_budget"]), default=None)


def known_speedups(report: Report, arm: str) -> list[Mapping[str, Any]]:
    return [s for s in report["speedups"] if (s["arm"], s["how"]) == (arm, "annealed") and is_known(s)]


def is_known(s: Mapping[str, Any]) -> bool:
    """True if the ratio or an end of its interval is known."""
    return (s["estimate"], s["low"], s["high"]) != (None, None, None)


def ratio(s: Mapping[str, Any] | None) -> str:
    """`1.17 (1.06 to 1.34, extrapolated)`."""
    if s is None:
        return DASH
    shown = interval(s["estimate"], s["low"], s["high"])
    return f"{shown.removesuffix(')')}, extrapolated)" if s["extrapolated"] else shown


NO_CONFOUNDS = "No confounds were found between the arms in what was looked at."


def facts(report: Report) -> list[str]:
    """Numbers of arms, budgets and seeds, and the metric."""
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
    """Warnings that stand before the first number."""
    n_seeds = len({entry["seed"] for entry in report["losses"]})
    said = []
    if n_seeds == 1:
        said.append("One seed: the noise between seeds is unknown, and nothing here is resolved.")
    if len(report["budgets"]) == 1:
        said.append("One budget: how the difference changes with the budget is unknown.")
    elsewhere: dict[int, set[str]] = {}
    for of in report["tuning_of_keys"].values():
        for key, at in of.get("tuned_elsewhere", {}).items():
            elsewhere.setdefault(at, set()).add(key)
    for at, keys in sorted(elsewhere.items()):
        of_keys = f"not at the budget of the verdict: {', '.join(sorted(keys))}"
        said.append(f"Tuned at {si(at)} tokens, {of_keys}. Other values may be best at this one.")
    said += _lost(report)
    said += [sentence for arm in report["arms"] for sentence in _thrown_away(report, arm)]
    if failed := ", ".join(str(audit["run"]) for audit in report["audits"] if audit_says(audit) != "equal"):
        said.append(f"Audit: training again does not give what is on record, or gave it of other records: {failed}.")
    if untuned := ", ".join(arm for arm in report["arms"] if not is_tuned(report, arm)):
        said.append(f"Untuned: {untuned}. The loss of an untuned arm is a bound.")
    return said


def _lost(report: Report) -> Iterator[str]:
    """Warnings for arms that were tried at a budget and have no loss there."""
    without = dict.fromkeys(x["arm"] for x in report["failures"] if x["arm"] not in report["arms"])
    yield from (f"No run of {arm} has ended, because runs failed." for arm in without)
    failed, ended = (Counter((x["arm"], x["budget"]) for x in report[name]) for name in ("failures", "losses"))
    for (arm, budget), n in failed.items():
        if budget is not None and arm not in without and str(budget) not in report["arms"][arm]["best_by_budget"]:
            why = f"{n} of its {n + ended[arm, budget]} runs there failed. A failure counts as worse than any loss"
            yield f"No comparison of {arm} at {si(budget)} tokens: {why}."


def _thrown_away(report: Report, arm: str) -> Iterator[str]:
    """A warning if a failed seed excludes values whose other seeds end lower than the same seeds at the best values."""
    at = budget_of(report, arm)
    ended = [x for x in report["losses"] if (x["arm"], x["budget"]) == (arm, at)]
    best = report["arms"][arm]["best_by_budget"].get(str(at), {})
    losses = {x["seed"]: x["loss"] for x in ended if x["values"] == best}
    for failed in [x for x in report["failures"] if (x["arm"], x["budget"]) == (arm, at)]:
        of_values = [x for x in ended if x["values"] == failed["values"] and x["seed"] in losses]
        gains = [losses[x["seed"]] - x["loss"] for x in of_values]
        if sum(gains) > 0:
            yield (
                f"With {values_text(failed['values'])} {arm} fails for a seed ({failed['reason']}), while "
                f"{len(gains)} of its seeds end lower in the mean than with the values that are compared: a failure "
                "counts as worse than any loss."
            )
            return


SHOWN = 24  # characters of a value in a sentence; the table shows all


def confound(entry: Mapping[str, Any]) -> str:
    """The values, arms and size of a difference: `(0.1 in gpt; 0.3 in ngpt; 3 times; the recipe brings 0)`."""
    said = (values_in_arms(entry, SHOWN), size_text(entry["size"]), entry["note"])
    return f"({'; '.join(filter(None, said))})"


FEW = 2  # arms at most of the commonest value that are named, not counted
MANY = 8  # distinct numbers at most that are listed


def values_in_arms(entry: Mapping[str, Any], length: int | None = None) -> str:
    """`scalar in a, b; vector in 5 others`. length: characters of a value at most."""
    texts = [short(value, 6) for value in entry["values"]]
    if length is not None:
        texts = [text if len(text) <= length else f"{text[:length]}…" for text in texts]
    if len(entry["arms"]) != len(texts):  # the runs of one arm
        return f"{' and '.join(texts)} in {', '.join(entry['arms'])}"
    by_value = dict[str, list[str]]()
    for arm, text in zip(entry["arms"], texts, strict=True):
        by_value.setdefault(text, []).append(arm)
    if len(by_value) > MANY and all(type(value) in (int, float) for value in entry["values"]):
        return f"{short(min(entry['values']), 6)} to {short(max(entry['values']), 6)}"
    common = max(by_value, key=lambda text: len(by_value[text]))
    arms = by_value.pop(common)
    named = arms if len(arms) <= FEW else [f"{len(arms)} others"]
    return "; ".join(f"{text} in {', '.join(of)}" for text, of in [*by_value.items(), (common, named)])


def differing(report: Report) -> list[dict[str, Any]]:
    """The differences. One between the runs of an arm, whose values stand in the difference between the arms, is a
    remark of the latter."""
    entries = [dict(entry) for entry in report["referee"]]
    for entry in [x for x in entries if len(x["arms"]) == 1]:
        (arm,) = entry["arms"]
        for other in entries:
            same = (other["kind"], other["key"]) == (entry["kind"], entry["key"]) and other is not entry
            values = dict(zip(other["arms"], other["values"], strict=False)).get(arm) if same else None
            if isinstance(values, list) and sorted(map(str, values)) == sorted(map(str, entry["values"])):
                other.setdefault("among", []).append(arm)
                entries.remove(entry)
                break
    for entry in entries:
        if among := entry.pop("among", []):
            said = f"the runs of {', '.join(among)} differ among themselves"
            entry["note"] = "; ".join(filter(None, [entry["note"], said]))
    return entries


def alike(entries: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """The keys of the entries that differ in nothing but their key, and the first of these entries."""
    found = dict[str, tuple[list[str], Mapping[str, Any]]]()
    for entry in entries:
        found.setdefault(repr({**entry, "key": None}), ([], entry))[0].append(entry["key"])
    return list(found.values())


def confounds(report: Report) -> list[tuple[list[str], Mapping[str, Any]]]:
    return alike([entry for entry in differing(report) if entry["kind"] == "confound"])


def notes(report: Report) -> list[str]:
    """The notes, without what the tables say: a verdict with its seeds and rows, and the noise of each budget."""
    verdicts, noise = ([f"{arm} {word} {report['baseline']}" for arm in report["arms"]] for word in ("against", "less"))
    shown = [x for x in report["notes"] if x.startswith(tuple(verdicts)) and ", the largest budget of both, from " in x]
    shown += [x for x in report["notes"] if x.startswith(tuple(f"{start}, standard deviation" for start in noise))]
    return [note for note in report["notes"] if note not in (*shown, OWN_NOISE)]


def looked_at(report: Report) -> list[str]:
    """The referee's scope: keys compared, differences that are no confounds, blind spots, untuned keys."""
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
    alone = [f" {said}" for arm in report["arms"] if (said := _tuned_alone(report, arm))]
    return (
        f"Of {baseline}, the baseline, {tuned} was tuned here, and {n} keys of optimizer, schedule, batch and "
        "initialisation were not. An untuned key of the baseline may be worth more than the difference."
        f"{''.join(alone)}"
    )


def _tuned_alone(report: Report, arm: str) -> str:
    """The keys that only one of the arm and the baseline was tuned for, a sentence; empty without one."""
    pair = arm, report["baseline"]
    keys = [report["tuning_of_keys"][x]["tuned"] for x in pair]
    own = [[key for key in of if key not in other] for of, other in (keys, keys[::-1])]
    said = [f"{x} alone for {', '.join(of)}" for x, of in zip(pair, own, strict=True) if of]
    both = ", ".join(key for key in keys[0] if key in keys[1]) or "no key"
    return f"{arm} and {pair[1]} were both tuned for {both}; {' and '.join(said)}." if said else ""


def size_text(size: float | None) -> str:
    """The size of a difference, a ratio of values, in words; empty where there is none."""
    if size is None:
        return ""
    digits = next((n for n in (3, 4, 5, 6, 7) if float(f"{size:.{n}g}") != 1), 3)  # 1.0001 times is not once
    return f"{number(size, None, digits)} times"


def audit_says(audit: Mapping[str, Any]) -> str:
    """The result of an audit. "outdated": the records have changed since."""
    if not audit["valid"]:
        return "outdated" if not audit["note"] else "unreadable"
    return "equal" if audit["equal"] else "not equal"
