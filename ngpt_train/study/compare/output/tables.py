"""The tables of a report, for report.md and the page. A cell is text; the renderer escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngpt_train.report.rounded import DASH, interval, number, percent, si
from ngpt_train.study.compare.output.series import end_losses
from ngpt_train.study.compare.output.wording import (
    HOW,
    UNITS,
    VERDICTS,
    Report,
    arms_and_values,
    audit_says,
    budget_of,
    is_known,
    is_tuned,
    known_speedups,
    label,
    ratio,
    size_text,
    speedups_of,
    values_text,
)
from ngpt_train.study.compare.statistics.equal_loss import FLATTERS
from ngpt_train.study.compare.statistics.intervals import POWER
from ngpt_train.study.compare.versus import POOLED

# Kinds of columns. In ARM the name of an arm gets its mark and stamps; only CODE cells are code.
ARM, NUMBER, CODE, TEXT, VERDICT = "arm", "number", "code", "text", "verdict"
Columns = Sequence[tuple[str, str]]  # name and kind


@dataclass(frozen=True)
class Table:
    name: str  # the anchor
    title: str
    columns: Columns
    rows: Sequence[Sequence[str]]
    note: str = ""
    empty: str = ""  # the sentence for a table without rows


def _minus(report: Report) -> tuple[str, str]:
    """The column of differences."""
    return f"Minus {report['baseline']} ({report['unit']}; negative: better)", NUMBER


def verdicts(report: Report) -> Table:
    """A row for each arm, at the budget of its verdict."""
    baseline = report["baseline"]
    trends = {trend["arm"]: trend for trend in report["trends"]}
    rows = []
    for arm in [baseline, *(name for name in report["arms"] if name != baseline)]:
        ratios = speedups_of(report, arm)
        word = VERDICTS.get(report["verdicts"].get(arm), DASH)
        if arm == baseline:
            word = "baseline" if is_tuned(report, arm) else "untuned"
        at = _at(report, arm, budget_of(report, arm))
        rows.append([arm, word, *at, *(ratio(ratios.get(unit)) for unit in UNITS), ratio(trends.get(arm))])
    columns = [("Arm", ARM), ("Verdict", VERDICT), ("Tokens", NUMBER), ("End loss", NUMBER), _minus(report)]
    columns += [*((f"Speed-up, {words}", NUMBER) for words in UNITS.values()), ("Twice the budget", NUMBER)]
    note = (
        f"Each row is of one budget, the largest that the arm and {baseline} both have. Loss in {report['unit']}, mean "
        f"over seeds. Speed-up: how many times the arm's tokens, FLOPs or seconds {baseline} needs for the loss that "
        f"the arm ends at, between annealed runs; extrapolated: it, or an end of its interval, lies beyond the budgets "
        f"of {baseline}. Twice the budget: the factor by which the speed-up in tokens then changes. In brackets: "
        f"{percent(report['confidence'])} intervals, which lack the price of the grid (Tuning)."
    )
    if any(s["clock"] == "own" for s in report["speedups"]):
        note += " Seconds by the runs' own clocks are marked in Speed-up."
    if POOLED in report["notes"]:
        note += f" {POOLED}"
    if any(d["n_seeds"] == 1 for d in report["differences"]):
        note += " Of an arm with one seed they are without the noise between seeds."
    if (n := len(report["arms"]) - 1) > 1:
        by_chance = percent(round(100 * (1 - report["confidence"] ** n)) / 100)
        note += (
            f" Each holds for itself: if none of the {n} arms differed from {baseline}, at least one would still be "
            f"called better or worse in up to some {by_chance} of such comparisons."
        )
    return Table("verdicts", "Verdicts", columns, rows, note, "No arm was compared.")


def _at(report: Report, arm: str, budget: int | None) -> list[str]:
    """The budget, the end loss, and the difference from the baseline there."""
    losses = end_losses(report, arm).get(budget or 0)
    gap = next((d for d in report["differences"] if (d["arm"], d["budget"]) == (arm, budget)), None)
    shown = interval(gap["estimate"], gap["low"], gap["high"]) if gap else DASH
    return [si(budget), number(float(np.mean(losses)), 4) if losses else DASH, shown]


def by_budget(report: Report) -> Table:
    """For a terminal: a row for each arm and budget."""
    rows = []
    for arm in report["arms"]:
        ratios = {s["budget"]: s for s in known_speedups(report, arm) if s["unit"] == "tokens"}
        word = "baseline" if arm == report["baseline"] else VERDICTS.get(report["verdicts"].get(arm), DASH)
        for budget in end_losses(report, arm):
            said = word if budget == budget_of(report, arm) else ""
            rows.append([arm, *_at(report, arm, budget), ratio(ratios.get(budget)), said])
    columns = [("Arm", ARM), ("Tokens", NUMBER), ("End loss", NUMBER), _minus(report), ("Speed-up, tokens", NUMBER)]
    return Table("by_budget", "", [*columns, ("Verdict", TEXT)], rows)


def tuning_of_keys(report: Report) -> Table:
    """Tuned and untuned keys. Keys with the same value in all arms stand in the first row."""
    of_arms = report["tuning_of_keys"]
    first, *others = (of["not_tuned"] for of in of_arms.values())
    alike = {key: value for key, value in first.items() if all(key in of and of[key] == value for of in others)}
    rows = [["all arms", "", "", values_text(alike)]] if alike else []
    for arm, of in of_arms.items():
        tuned = values_text(of["tuned"]) + (f" at {si(of['budget'])} tokens" if of["tuned"] else "")
        own = {key: value for key, value in of["not_tuned"].items() if key not in alike}
        rows.append([arm, tuned, values_text(of["chosen"]), values_text(own)])
    names = ("Tuned here: the values tried", "Chosen beforehand, by hand", "Not tuned")
    note = (
        "Chosen beforehand: set for the arm, or not what its recipe brings; it may have been "
        "tuned elsewhere. Not tuned: what the recipe brings, but for keys that are null."
    )
    columns = [("Arm", ARM), *((name, CODE) for name in names)]
    return Table("tuning_of_keys", "What was tuned, and what was not", columns, rows, note)


def end_loss(report: Report) -> Table:
    budgets = sorted(report["budgets"])
    rows = []
    for arm in report["arms"]:
        losses = end_losses(report, arm)
        rows.append([arm, *(_mean_and_spread(losses.get(budget, [])) for budget in budgets)])
    note = f"{report['unit']}; mean ± standard deviation over the seeds (how many), at the best values tried."
    columns = [("Arm", ARM), *((f"{si(budget)} tokens", NUMBER) for budget in budgets)]
    return Table("end_loss", "End loss", columns, rows, note)


def _mean_and_spread(losses: list[float]) -> str:
    if not losses:
        return DASH
    spread = f" ± {number(float(np.std(losses, ddof=1)), 4)}" if len(losses) > 1 else ""
    return f"{number(float(np.mean(losses)), 4)}{spread} ({len(losses)})"


def differences(report: Report) -> Table:
    rows = []
    for d in report["differences"]:
        needed = d.get("needed") or {}
        noise = (number(d.get(name), None, 2) for name in ("noise_seeds", "noise_rows"))
        counts = (si(d[name]) for name in ("n_seeds", "n_rows"))
        ways = (si(needed.get(name)) for name in ("seeds", "rows", "steps"))
        shown = interval(d["estimate"], d["low"], d["high"])
        rows.append([d["arm"], si(d["budget"]), shown, *noise, *counts, number(d.get("detectable"), None, 2), *ways])
    names = ["Noise of seeds", "Noise of rows", "Seeds", "Rows", "Resolvable"]
    names += ["Seeds needed", "Rows needed", "Steps needed"]
    note = (
        f"Paired by seed and validation row; all in {report['unit']}. Noise: standard error of the difference that "
        "comes from seeds, and from validation rows beyond what differs with the seed, "
        f"which may be nothing. Resolvable: the difference that so many seeds and rows resolve in {percent(POWER)} of "
        "the cases. Needed: how many seeds, rows or steps would each alone resolve one of the size found in "
        f"{percent(POWER)} of the cases; {DASH}: it is resolved, or none of a reasonable number would, or one seed "
        "does not show the noise."
    )
    columns = [("Arm", ARM), ("Budget (tokens)", NUMBER), _minus(report), *((name, NUMBER) for name in names)]
    return Table("differences", "Differences and their noise", columns, rows, note, "No two arms share a budget.")


def speedups(report: Report) -> Table:
    """A row for each arm and budget, between annealed runs, or within one schedule if no other ratio is known. Unknown
    ratios with the same reason share a row."""
    groups, unknown = dict[tuple[str, str, int], list[Any]](), dict[tuple[str, str, str], dict[str, None]]()
    annealed = {(s["arm"], s["budget"]) for s in report["speedups"] if s["how"] == "annealed" and is_known(s)}
    for s in report["speedups"]:
        if s["how"] == "annealed" or (s["arm"], s["budget"]) not in annealed:
            groups.setdefault((s["arm"], s["how"], s["budget"]), []).append(s)
    rows = []
    for (arm, how, budget), entries in groups.items():
        ratios = {s["unit"]: ratio(s) if is_known(s) else DASH for s in entries}
        remarks = _remarks(entries)
        if any(is_known(s) for s in entries):
            rows.append([arm, HOW[how], si(budget), *(ratios.get(unit, DASH) for unit in UNITS), remarks or DASH])
        else:
            unknown.setdefault((HOW[how], si(budget), remarks), {})[label(report, arm)] = None
    for (in_words, at, why), arms in unknown.items():
        whose = "all arms" if len(arms) == len(report["arms"]) - 1 > 1 else ", ".join(arms)
        rows.append([whose, in_words, at, *(DASH for _ in UNITS), why or DASH])
    note = (
        "How many times the arm's tokens, FLOPs or seconds the baseline needs. A ratio within one schedule, for the "
        "loss that the worse of the two ends at, stands here where no other is known, and is no verdict: it flatters "
        "the arm whose learning rate decays faster. The intervals have the noise of the losses, and not the error of "
        "the form that is fitted."
    )
    columns = [("Arm", ARM), ("How", TEXT), ("Budget (tokens)", NUMBER), *((unit, NUMBER) for unit in UNITS.values())]
    columns.append(("Remarks", TEXT))
    return Table("speedups", "Speed-up", columns, rows, note, "No loss of the baseline was matched.")


def _remarks(entries: Sequence[Mapping[str, Any]]) -> str:
    """The notes of the entries, which differ in their unit. A note begins with its units, unless all have it."""
    units = dict[str, list[str]]()
    for s in entries:
        notes = [note for note in (s["note"] or "").split("; ") if note not in ("", FLATTERS)]
        for note in [*notes, *([f"clock: {s['clock']}"] if s["clock"] and is_known(s) else [])]:
            units.setdefault(note, []).append(UNITS[s["unit"]])
    of_all = len(entries)
    return "; ".join(
        note if len(of) == of_all or note.startswith("clock") else f"{', '.join(of)}: {note}"
        for note, of in units.items()
    )


def tuning(report: Report) -> Table:
    rows = []
    for t in report["tuning"]:
        failed = sum(bool(point["failed"]) for point in t["points"])
        chosen = report["arms"][t["arm"]]["best_by_budget"].get(str(t["budget"]), {}).get(t["key"])
        rows.append(
            [
                t["arm"],
                si(t["budget"]),
                t["key"],
                "bracketed" if t["state"] == "bracketed" else f"untuned ({t['state']})",
                f"{chosen:.4g}" if type(chosen) is float else str(chosen),
                _optimum(t),
                *(number(t[price], 4) for price in ("price_of_two", "price_of_grid")),
                f"{len(t['points'])}" + (f", {failed} failed" if failed else ""),
            ]
        )
    numbers = ["Best tried", "Optimum of the parabola", f"Price of a factor of 2 ({report['unit']})"]
    numbers += [f"Price of the grid ({report['unit']})", "Points tried"]
    columns = [("Arm", ARM), ("Budget (tokens)", NUMBER), ("Key", CODE), ("State", VERDICT)]
    columns += [(name, NUMBER) for name in numbers]
    note = "Bracketed: on both sides some value tried is worse than the best, by more than the noise between seeds."
    note += " Price of the grid: by how much the parabola's loss at the best value lies above its lowest one."
    note += " The best is chosen by the runs that are then compared, which flatters each arm by a part of its noise."
    return Table("tuning", "Tuning", columns, rows, note, "No key was tuned.")


def _optimum(entry: Mapping[str, Any]) -> str:
    optimum, low, high = (number(entry[name], None, 3) for name in ("optimum", "low", "high"))
    return optimum + (f" ({low} to {high})" if DASH not in (optimum, low, high) else "")


def costs(report: Report) -> Table:
    rows = []
    for c in report["costs"]:
        counts = (si(c[name]) for name in ("n_params", "n_params_without_embeddings", "flops_per_token"))
        how = f" ({c['step_time_how']})" if c["step_time_how"] else ""
        times = _ms(c["step_time"]) + how, _ms(c.get("step_time_own"))
        rows.append([c["arm"], *counts, number(c["memory_gb"], None, 3), *times])
    names = ["Parameters", "Without embeddings", "FLOPs per token", "Peak memory (GB)", "Step time (ms)"]
    columns = [("Arm", ARM), *((name, NUMBER) for name in [*names, "By its own clock (ms)"])]
    note = (
        "Peak memory is of a GPU's tensors; on a CPU it is of the whole process, the preparation of its data included."
    )
    return Table("costs", "Memory and step time", columns, rows, note, "No costs are known.")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    return number(1000 * seconds, 0) if seconds >= 0.1 else number(1000 * seconds, None, 3)


def referee(report: Report) -> Table:
    words = {"confound": "confound", "under_test": "under test", "follows": "follows from it"}
    rows = []
    for entry in sorted(report["referee"], key=lambda entry: list(words).index(entry["kind"])):
        arms, values = arms_and_values(entry)
        named = ", ".join(label(report, arm) if arm in report["arms"] else arm for arm in arms)
        named = "all arms" if arms == list(report["arms"]) else named
        size = size_text(entry["size"]) if entry["size"] is not None else DASH
        rows.append([words[entry["kind"]], named, entry["key"], " | ".join(values), size, entry["note"] or DASH])
    columns = [("Kind", VERDICT), ("Arms", TEXT), ("What differs", CODE), ("Values", CODE), ("Size", TEXT)]
    note = (
        "Every way in which two arms differ: the thing under test, what follows from it, and confounds, which may be "
        "the true cause of a difference. Values of all arms stand in the order of End loss."
    )
    empty = "The arms differ in nothing."
    return Table("referee", "What differs between the arms", [*columns, ("Note", TEXT)], rows, note, empty)


def failures(report: Report) -> Table:
    rows = []
    for f in report["failures"]:
        seed = DASH if f["seed"] is None else str(f["seed"])
        rows.append([f["arm"], si(f["budget"]), seed, values_text(f["values"]), f["reason"] or DASH, str(f["run"])])
    columns = [("Arm", ARM), ("Budget (tokens)", NUMBER), ("Seed", NUMBER), ("Values", CODE), ("Reason", TEXT)]
    note = "A point that failed counts as worse than any that did not." if rows else ""
    return Table("failures", "Failed points", [*columns, ("Run", CODE)], rows, note, "No point failed.")


def audits(report: Report) -> Table:
    rows = []
    for a in report["audits"]:
        windows = ", ".join(f"{start} to {end}" for start, end in a["windows"]) or DASH
        counted = f"{si(a['steps_compared'])} of {si(a['steps'])}"
        where = " ".join(filter(None, [a["device"], a["time"], a["note"]])) or DASH
        says = (audit_says(a), a["how"] or DASH, windows, counted)
        rows.append([str(a["run"]), *says, str(a["found"]), a["commit"] or "", where])
    columns = [("Run", CODE), ("Result", VERDICT), ("Compared", TEXT), ("Windows (steps)", TEXT)]
    columns += [("Steps trained again", NUMBER), ("Findings", NUMBER), ("Commit", CODE), ("Where, when", TEXT)]
    note = "Windows between checkpoints were trained again, and their losses compared with those on record."
    return Table("audits", "Audits", columns, rows, note, "No run was audited.")


def runs(report: Report) -> Table:
    rows = []
    for x in report["losses"]:
        values, loss = values_text(x["values"]), number(x["loss"], 6)
        where = (x["rows_hash"] or "", str(x["run"]))
        rows.append([x["arm"], si(x["budget"]), str(x["seed"]), values, loss, str(x["step"]), *where])
    columns = [("Arm", ARM), ("Budget (tokens)", NUMBER), ("Seed", NUMBER), ("Values", CODE)]
    columns += [(f"Loss ({report['unit']})", NUMBER), ("Step", NUMBER), ("Rows", CODE), ("Run", CODE)]
    return Table("runs", "Runs", columns, rows, "Rows: the hash of the validation rows.", "No run has ended.")


AFTER_THE_FIGURES = (end_loss, speedups, differences, tuning, costs, referee, audits, failures)
