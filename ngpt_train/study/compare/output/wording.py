"""The sentences of a report, the same in report.md, on the page, on figures and on the console: its findings, and what
a reader must know before the first number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngpt_train.report.rounded import DASH, interval, number, percent, si
from ngpt_train.study.compare.referee import BROUGHT
from ngpt_train.study.compare.statistics.intervals import POWER

Report = Mapping[str, Any]  # report.json

UNITS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
HOW = {"annealed": "between annealed runs", "within_schedule": "within one schedule"}
VERDICTS = {"better": "better", "worse": "worse", "not_resolved": "not resolved", "untuned": "untuned"}
OWN_CLOCKS = " by the runs' own clocks"
WITHIN_SCHEDULE = "within one schedule; this flatters the arm whose learning rate decays faster"


def is_tuned(report: Report, arm: str) -> bool:
    return bool(report["arms"][arm]["tuned"])


def stamps(report: Report, arm: str) -> list[str]:
    """Remarks that stand beside the arm's name in every table and figure."""
    found = [] if is_tuned(report, arm) else ["untuned"]
    return [*found, "not resolved"] if report["verdicts"].get(arm) == "not_resolved" else found


def label(report: Report, arm: str) -> str:
    """The arm's name with its stamps: `powernorm (untuned)`."""
    found = stamps(report, arm)
    return f"{arm} ({', '.join(found)})" if found else arm


def values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value:.4g}" if type(value) is float else f"{key}={value}" for key, value in values.items()
    )


def largest(found: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The entry of the largest budget."""
    return max(found, key=lambda entry: entry["budget"] or 0, default=None)


def difference_of(report: Report, arm: str) -> Mapping[str, Any] | None:
    """At the largest budget that both arms have."""
    return largest([d for d in report["differences"] if d["arm"] == arm and d["estimate"] is not None])


def budget_of(report: Report, arm: str) -> int | None:
    """The budget of the arm's verdict: the largest that it shares with the baseline, else its own largest."""
    if found := difference_of(report, arm):
        return int(found["budget"])
    return max(map(int, report["arms"][arm]["best_by_budget"]), default=None)


def speedups_of(report: Report, arm: str, how: str = "annealed") -> dict[str, Mapping[str, Any]]:
    """By unit, at the budget of the verdict, where something of it is known."""
    return {s["unit"]: s for s in known_speedups(report, arm, how) if s["budget"] == budget_of(report, arm)}


def speedups_inside(report: Report, arm: str) -> dict[str, Mapping[str, Any]]:
    """By unit, at the largest budget where the ratio and its interval lie inside the budgets of the baseline."""
    found = [s for s in known_speedups(report, arm, "annealed") if not s["extrapolated"] and None not in _ends(s)]
    at = (largest(found) or {}).get("budget")
    return {s["unit"]: s for s in found if s["budget"] == at}


def known_speedups(report: Report, arm: str, how: str) -> list[Mapping[str, Any]]:
    return [s for s in report["speedups"] if (s["arm"], s["how"]) == (arm, how) and is_known(s)]


def is_known(s: Mapping[str, Any]) -> bool:
    """Something of a ratio or of its interval."""
    return _ends(s) != (None, None, None)


def _ends(s: Mapping[str, Any]) -> tuple[Any, ...]:
    return s["estimate"], s["low"], s["high"]


def ratio(s: Mapping[str, Any] | None) -> str:
    """`1.17 (1.06 to 1.34, extrapolated)`: no ratio with a part beyond the data stands without this word."""
    if s is None:
        return DASH
    return interval(*_ends(s)).removesuffix(")") + ", extrapolated" * bool(s["extrapolated"]) + ")"


def finding(report: Report, arm: str) -> str:
    """The results of the arm, in plain sentences."""
    if arm == report["baseline"]:
        rest = "" if is_tuned(report, arm) else f" {_untuned(report, arm)}, and every comparison with it is too."
        return f"The baseline.{rest}"
    verdict, baseline = report["verdicts"].get(arm), report["baseline"]
    sentences = [_gap(report, arm), _matched(report, arm), _trend(report, arm), _between(report, arm)]
    sentences += [_fails(report, name) for name in (arm, baseline)]
    measured = " ".join(filter(None, sentences))
    if verdict == "untuned":
        whose = arm if not is_tuned(report, arm) else baseline
        return f"No verdict: {_untuned(report, whose)}. {measured}".strip()
    if verdict in ("better", "worse"):
        return f"{arm} is {verdict} than {baseline}. {measured}"
    return f"Whether {arm} or {baseline} is better is not resolved. {measured} {_needed(report, arm)}".strip()


def _untuned(report: Report, arm: str) -> str:
    states = {entry["key"]: entry["state"] for entry in report["tuning"] if entry["arm"] == arm}
    edge = ", ".join(key for key, state in states.items() if state == "edge")
    if edge:
        return f"{arm} is untuned: the best {edge} lies at the edge of what was tried, so that its loss is a bound"
    if arm == report["baseline"] or "not tried" in states.values():
        return f"{arm} is untuned: no more than one learning rate was tried"
    return f"{arm} is untuned"


def _gap(report: Report, arm: str) -> str:
    found = difference_of(report, arm)
    if found is None:
        return ""
    seeds, rows = found["n_seeds"], found["n_rows"]
    sample = f"{seeds} seed{'s' * (seeds != 1)}" + (f", {rows} validation rows" if rows else "")
    sample += ", without the noise between seeds, which one seed does not show" if seeds == 1 and rows else ""
    low, high = found["low"], found["high"]
    is_named = report["verdicts"].get(arm) in ("better", "worse")  # the sentence before this one has one subject
    metric = report["metric"].replace("_", " ")
    what = f"its {metric}" if is_named else f"the {metric} of {arm}"
    if low is not None and high is not None and low * high > 0:  # the interval excludes no difference
        smaller = high < 0
        ends = (-high, -low) if smaller else (low, high)
        shown = (
            f"{what} is {interval(abs(found['estimate']), *ends)} {report['unit']} {'lower' if smaller else 'higher'}"
            + f" than that of {report['baseline']}" * (not is_named)
        )
    else:
        shown = f"{what} less that of {report['baseline']} is {interval(found['estimate'], low, high)} {report['unit']}"
    return f"After {si(found['budget'])} tokens {shown} ({percent(found['confidence'])}; {sample})."


def _matched(report: Report, arm: str) -> str:
    baseline, said = report["baseline"], []
    whose, ending = arm, ""
    found, inside = speedups_of(report, arm), speedups_inside(report, arm)
    if not found and not inside:
        found = speedups_of(report, arm, "within_schedule")
        whose, ending = "the worse of the two", f" of {arm} ({WITHIN_SCHEDULE})"
    if found:
        said.append(
            f"For the loss that {whose} ends at after {si(budget_of(report, arm))} tokens, {baseline} needs "
            f"{_times(found)}{ending}."
        )
    if inside and (at := largest(list(inside.values()))) and at["budget"] != budget_of(report, arm):
        said.append(
            f"After {si(at['budget'])} tokens, the largest budget where this is known from inside the budgets of "
            f"{baseline}, it needs {_times(inside)}."
        )
    return " ".join(said)


def _times(found: Mapping[str, Mapping[str, Any]]) -> str:
    """`1.26 (1.16 to 1.37) times the tokens and 1.22 (1.11 to 1.33) times the seconds`."""
    *ratios, last = [
        f"{ratio(s)} times the {UNITS[unit]}{OWN_CLOCKS * (s['clock'] == 'own')}" for unit, s in found.items()
    ]
    return f"{', '.join(ratios)} and {last}" if ratios else last


def _trend(report: Report, arm: str) -> str:
    """Whether the speed-up grows with the budget."""
    found = next((trend for trend in report["trends"] if trend["arm"] == arm), None)
    if found is None:
        return ""
    low, high = found["low"], found["high"]
    says = "whether it grows with the budget is not resolved"
    if low is not None and high is not None and not low <= 1 <= high:
        says = "it grows with the budget" if low > 1 else "it shrinks as the budget grows"
    factor = interval(found["estimate"], low, high)
    beyond = "; some of these speed-ups lie beyond the budgets of the fit" * bool(found["extrapolated"])
    return f"Where the budget doubles, this speed-up is multiplied by {factor}: {says}{beyond}."


def _between(report: Report, arm: str) -> str:
    """How much lower the losses may be at values between the tried ones, at the budget of the verdict."""
    at = (difference_of(report, arm) or {}).get("budget")
    prices = {
        name: sum(t["price_of_grid"] or 0 for t in report["tuning"] if (t["arm"], t["budget"]) == (name, at))
        for name in (arm, report["baseline"])
    }
    gains = [f"that of {name} by {number(price, None, 2)}" for name, price in prices.items() if price >= SMALLEST_PRICE]
    if not gains:
        return ""
    said = f"{' and '.join(gains)} {report['unit']}".removeprefix("that")
    return (
        f"By the parabolas of the tuning, values between those tried would lower the loss{said}; the intervals lack "
        "this."
    )


def _fails(report: Report, arm: str) -> str:
    """Where a value is thrown away for a seed that fails, though the others end lower than with the best one."""
    at = budget_of(report, arm)
    ended = [x for x in report["losses"] if (x["arm"], x["budget"]) == (arm, at)]
    best = report["arms"][arm]["best_by_budget"].get(str(at), {})
    losses = [x["loss"] for x in ended if x["values"] == best]
    for failed in [x for x in report["failures"] if (x["arm"], x["budget"]) == (arm, at)]:
        others = [x["loss"] for x in ended if x["values"] == failed["values"]]
        if others and losses and sum(others) / len(others) < sum(losses) / len(losses):
            return (
                f"With {values_text(failed['values'])} {arm} fails for a seed ({failed['reason']}), while "
                f"{len(others)} of its seeds end lower than with the values that are compared: a failure counts as "
                "worse than any loss."
            )
    return ""


def _needed(report: Report, arm: str) -> str:
    found = difference_of(report, arm)
    needed = (found or {}).get("needed") or {}
    ways = [f"{si(needed[what])} {name}" for what, name in NEEDED.items() if needed.get(what)]
    said = []
    if seen := (found or {}).get("detectable"):
        said.append(
            f"With this noise, these runs resolve a difference of {number(seen, None, 2)} {report['unit']} in "
            f"{percent(POWER)} of the cases."
        )
    if ways:
        said.append(
            f"A difference of the size found would be resolved in {percent(POWER)} of the cases by some "
            f"{' or '.join(ways)}."
        )
    return " ".join(said)


SMALLEST_PRICE = 0.0005  # of a grid; a smaller one is not worth a sentence
NEEDED = {"seeds": "seeds", "rows": "validation rows", "steps": "steps"}


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
    """Warnings for arms that have been tried at a budget, and have no loss there."""
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
    return (
        f"Of {baseline}, the baseline, {tuned} was tuned here, and {n} keys of optimizer, schedule, batch and "
        "initialisation were not. An untuned key of the baseline may be worth more than the difference."
    )


def size_text(size: Any) -> str:
    """The size of a difference that the referee found; a number is the ratio of the values."""
    if type(size) not in (int, float):
        return str(size)
    digits = next((n for n in (3, 4, 5, 6, 7) if float(f"{size:.{n}g}") != 1), 3)  # 1.0001 times is not once
    return f"{number(size, None, digits)} times"


def audit_says(audit: Mapping[str, Any]) -> str:
    """The certificate of a run in words; it may be of records that have changed since."""
    if not audit["valid"]:
        return "outdated" if not audit["note"] else "unreadable"
    return "equal" if audit["equal"] else "not equal"
