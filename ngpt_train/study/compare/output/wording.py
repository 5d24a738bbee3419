"""Numbers and findings of a report in words: the same in report.md, on the page, on figures and on the console."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ngpt_train.study.compare.statistics.power import POWER

Report = Mapping[str, Any]  # report.json

DASH = "\N{EN DASH}"  # no value
UNITS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
HOW = {"annealed": "between annealed runs", "within_schedule": "within one schedule"}
VERDICTS = {"better": "better", "worse": "worse", "not_resolved": "not resolved", "untuned": "untuned"}
WITHIN_SCHEDULE = "within one schedule; this flatters the arm whose learning rate decays faster"


def si(value: float | None, digits: int = 3) -> str:
    """8388608 -> 8.39M. A dash where there is no value."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    power = min(max(math.floor(math.log10(abs(value)) / 3), -4), 6) if abs(value) >= 1000 or abs(value) < 0.001 else 0
    scaled = float(f"{value / 1000.0**power:.{digits}g}")
    if abs(scaled) >= 1000 and power < 6:  # 999999 -> 1M, not 1000k
        power, scaled = power + 1, scaled / 1000
    return number(scaled, None, digits) + ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E")[power + 4]


def number(value: float | None, decimals: int | None = None, digits: int = 4) -> str:
    """With so many decimals, or so many significant digits where None; a true minus sign."""
    if value is None:
        return DASH
    text = f"{value:.{decimals}f}" if decimals is not None else f"{value:.{digits}g}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "\N{MINUS SIGN}")


def decimals_for(estimate: float | None, low: float | None, high: float | None) -> int:
    """Decimals that give half the interval's width two significant digits, and a bare estimate three."""
    width = (high - low) / 2 if low is not None and high is not None else 0.0
    shown = width or abs(estimate or low or high or 0.0) / 10
    return min(max(2, 1 - math.floor(math.log10(shown))), 6) if shown else 4


def interval(estimate: float | None, low: float | None, high: float | None) -> str:
    """`-0.041 (-0.050 to -0.032)`; a bound where one end is open."""
    if estimate is None and low is None and high is None:
        return DASH
    n = decimals_for(estimate, low, high)
    shown = number(estimate, n) if estimate is not None else ""
    return f"{shown} ({_range(low, high, n)})".strip()


def _range(low: float | None, high: float | None, decimals: int) -> str:
    if low is None and high is None:
        return "no interval"
    if high is None:
        return f"at least {number(low, decimals)}"
    if low is None:
        return f"at most {number(high, decimals)}"
    return f"{number(low, decimals)} to {number(high, decimals)}"


def percent(confidence: float) -> str:
    return f"{100 * confidence:g} %"


def is_tuned(report: Report, arm: str) -> bool:
    return bool(report["arms"][arm]["tuned"])


def stamps(report: Report, arm: str) -> list[str]:
    """What every table and figure says beside the arm's name."""
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


def speedup_of(report: Report, arm: str, unit: str, how: str = "annealed") -> Mapping[str, Any] | None:
    """At the largest budget with both ends of an interval inside the data, else at the largest."""
    found = [s for s in report["speedups"] if (s["arm"], s["unit"], s["how"]) == (arm, unit, how)]
    found = [s for s in found if (s["estimate"], s["low"], s["high"]) != (None, None, None)]
    closed = [s for s in found if s["low"] is not None and s["high"] is not None and not s["extrapolated"]]
    return largest(closed) or largest(found)


def finding(report: Report, arm: str) -> str:
    """What is known about the arm, in plain sentences."""
    if arm == report["baseline"]:
        rest = "" if is_tuned(report, arm) else f" {_untuned(report, arm)}, and every comparison with it is too."
        return f"The baseline.{rest}"
    verdict, baseline = report["verdicts"].get(arm), report["baseline"]
    sentences = [_gap(report, arm), _matched(report, arm), _trend(report, arm), _between(report, arm)]
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
    found = {unit: s for unit in UNITS if (s := speedup_of(report, arm, unit))}
    whose, ending = arm, ""
    if not found:
        found = {unit: s for unit in UNITS if (s := speedup_of(report, arm, unit, "within_schedule"))}
        whose, ending = "the worse of the two", f" of {arm} ({WITHIN_SCHEDULE})"
    if not found:
        return ""
    ratios = [
        f"{interval(s['estimate'], s['low'], s['high'])} times the {UNITS[unit]}"
        + " by the runs' own clocks" * (s["clock"] == "own")
        for unit, s in found.items()
    ]
    last = ratios.pop()
    listed = f"{', '.join(ratios)} and {last}" if ratios else last
    first = next(iter(found.values()))
    beyond = " This, or an end of its interval, lies beyond the budgets of the fit." if first["extrapolated"] else ""
    return (
        f"For the loss that {whose} ends at after {si(first['budget'])} tokens, {report['baseline']} needs {listed}"
        f"{ending}.{beyond}"
    )


def _trend(report: Report, arm: str) -> str:
    """Whether the speed-up grows with the budget."""
    found = next((trend for trend in report.get("trends") or [] if trend["arm"] == arm), None)
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
    """What values between those that were tried may change, at the budget of the verdict."""
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
    failed = [str(audit["run"]) for audit in report.get("audits") or [] if audit_says(audit) != "equal"]
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
