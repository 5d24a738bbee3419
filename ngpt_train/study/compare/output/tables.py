"""The tables of a report, which report.md and the page both show. A cell is text; a renderer escapes it."""

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
    finding,
    is_tuned,
    known_speedups,
    label,
    ratio,
    size_text,
    speedups_of,
    values_text,
)
from ngpt_train.study.compare.statistics.intervals import POWER
from ngpt_train.study.compare.versus import POOLED


@dataclass(frozen=True)
class Cell:
    text: str
    arm: str | None = None  # an arm's name, which gets its mark and its stamps
    kind: str = ""  # number | code | verdict | confound | follows | under_test


@dataclass(frozen=True)
class Table:
    name: str  # the anchor
    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    note: str = ""
    empty: str = ""  # what is said where there are no rows


def arm_cell(name: str) -> Cell:
    return Cell(name, arm=name)


def number_cell(text: str) -> Cell:
    return Cell(text, kind="number")


def minus(report: Report) -> str:
    """The head of a column of differences."""
    return f"Minus {report['baseline']} ({report['unit']}; negative: better)"


def end_loss(report: Report) -> Table:
    budgets = sorted(report["budgets"])
    rows = []
    for arm in report["arms"]:
        losses = end_losses(report, arm)
        rows.append([arm_cell(arm), *(number_cell(_mean_and_spread(losses.get(budget, []))) for budget in budgets)])
    note = f"{report['unit']}; mean ± standard deviation over the seeds (how many), at the best values tried."
    return Table("end_loss", "End loss", ["Arm", *(f"{si(b)} tokens" for b in budgets)], rows, note)


def _mean_and_spread(losses: list[float]) -> str:
    if not losses:
        return DASH
    spread = f" ± {number(float(np.std(losses, ddof=1)), 4)}" if len(losses) > 1 else ""
    return f"{number(float(np.mean(losses)), 4)}{spread} ({len(losses)})"


def differences(report: Report) -> Table:
    rows = []
    for d in report["differences"]:
        needed = d.get("needed") or {}
        rows.append(
            [
                arm_cell(d["arm"]),
                number_cell(si(d["budget"])),
                number_cell(interval(d["estimate"], d["low"], d["high"])),
                number_cell(number(d["noise_seeds"], None, 2)),
                number_cell(number(d["noise_rows"], None, 2)),
                number_cell(si(d["n_seeds"])),
                number_cell(si(d["n_rows"])),
                number_cell(number(d.get("detectable"), None, 2)),
                number_cell(si(needed.get("seeds"))),
                number_cell(si(needed.get("rows"))),
                number_cell(si(needed.get("steps"))),
            ]
        )
    columns = ["Arm", "Budget (tokens)", minus(report), "Noise of seeds", "Noise of rows"]
    columns += ["Seeds", "Rows", "Resolvable", "Seeds needed", "Rows needed", "Steps needed"]
    note = (
        f"Paired by seed and validation row; all in {report['unit']}. Noise: standard error of the difference that "
        "comes from seeds, and from validation rows beyond what differs with the seed, "
        f"which may be nothing. Resolvable: the difference that so many seeds and rows resolve in {percent(POWER)} of "
        "the cases. Needed: how many seeds, rows or steps would each alone resolve one of the size found in "
        f"{percent(POWER)} of the cases; {DASH}: it is resolved, or none of a reasonable number would, or one seed "
        "does not show the noise."
    )
    return Table("differences", "Differences and their noise", columns, rows, note, "No two arms share a budget.")


def speedups(report: Report) -> Table:
    rows, unknown = [], dict[tuple[str, str, str], dict[str, None]]()
    for s in report["speedups"]:
        if s["note"] and (s["estimate"], s["low"], s["high"]) == (None, None, None):
            unknown.setdefault((s["how"], si(s["budget"]), s["note"]), {})[label(report, s["arm"])] = None
            continue
        remarks = ". ".join(filter(None, [s["note"], s["clock"] and f"clock: {s['clock']}"]))
        rows.append(
            [
                arm_cell(s["arm"]),
                Cell(UNITS[s["unit"]]),
                Cell(HOW[s["how"]]),
                number_cell(si(s["budget"])),
                number_cell(ratio(s)),
                Cell(remarks or DASH),
            ]
        )
    for (how, budget, why), arms in unknown.items():
        whose = "all arms" if len(arms) == len(report["arms"]) - 1 > 1 else ", ".join(arms)
        rows.append([Cell(whose), Cell(DASH), Cell(HOW[how]), number_cell(budget), number_cell(DASH), Cell(why)])
    columns = ["Arm", "Unit", "How", "Budget (tokens)", "Speed-up (times)", "Remarks"]
    note = (
        "Within one schedule, for the loss that the worse of the two ends at, flatters the arm whose learning rate "
        "decays faster; it is no verdict. The intervals have the noise of the losses, and not the error of the form "
        "that is fitted."
    )
    return Table("speedups", "Speed-up", columns, rows, note, "No loss of the baseline was matched.")


def tuning(report: Report) -> Table:
    rows = []
    for t in report["tuning"]:
        failed = sum(bool(point["failed"]) for point in t["points"])
        tried = f"{len(t['points'])}" + (f", {failed} failed" if failed else "")
        chosen = report["arms"][t["arm"]]["best_by_budget"].get(str(t["budget"]), {}).get(t["key"])
        rows.append(
            [
                arm_cell(t["arm"]),
                number_cell(si(t["budget"])),
                Cell(t["key"], kind="code"),
                Cell("bracketed" if t["state"] == "bracketed" else f"untuned ({t['state']})", kind="verdict"),
                number_cell(f"{chosen:.4g}" if type(chosen) is float else str(chosen)),
                number_cell(_optimum(t)),
                number_cell(number(t["price_of_two"], 4)),
                number_cell(number(t["price_of_grid"], 4)),
                number_cell(tried),
            ]
        )
    columns = ["Arm", "Budget (tokens)", "Key", "State", "Best tried", "Optimum of the parabola"]
    columns += [f"Price of a factor of 2 ({report['unit']})", f"Price of the grid ({report['unit']})", "Points tried"]
    note = "Bracketed: on both sides some value tried is worse than the best, by more than the noise between seeds."
    note += " Price of the grid: by how much the parabola's loss at the best value lies above its lowest one."
    note += " The best is chosen by the runs that are then compared, which flatters each arm by a part of its noise."
    return Table("tuning", "Tuning", columns, rows, note, "No key was tuned.")


def _optimum(entry: Mapping[str, Any]) -> str:
    if entry["optimum"] is None:
        return DASH
    ends = (entry["low"], entry["high"])
    return number(entry["optimum"], None, 3) + (
        f" ({number(ends[0], None, 3)} to {number(ends[1], None, 3)})" if None not in ends else ""
    )


def costs(report: Report) -> Table:
    rows = []
    for c in report["costs"]:
        how = f" ({c['step_time_how']})" if c["step_time_how"] else ""
        rows.append(
            [
                arm_cell(c["arm"]),
                number_cell(si(c["n_params"])),
                number_cell(si(c["n_params_without_embeddings"])),
                number_cell(si(c["flops_per_token"])),
                number_cell(number(c["memory_gb"], None, 3)),
                number_cell(_ms(c["step_time"]) + how),
                number_cell(_ms(c.get("step_time_own"))),
            ]
        )
    columns = [
        "Arm",
        "Parameters",
        "Without embeddings",
        "FLOPs per token",
        "Peak memory (GB)",
        "Step time (ms)",
        "By its own clock (ms)",
    ]
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
    entries = sorted(report["referee"], key=lambda entry: list(words).index(entry["kind"]))
    rows = [
        [
            Cell(words[entry["kind"]], kind=entry["kind"]),
            Cell(", ".join(label(report, arm) if arm in report["arms"] else arm for arm in arms)),
            Cell(entry["key"], kind="code"),
            Cell(" | ".join(values), kind="code"),
            Cell(size_text(entry["size"]) if entry["size"] is not None else DASH),
            Cell(entry["note"] or DASH),
        ]
        for entry, (arms, values) in zip(entries, map(arms_and_values, entries), strict=True)
    ]
    columns = ["Kind", "Arms", "What differs", "Values", "Size", "Note"]
    note = (
        "Every way in which two arms differ: the thing under test, what follows from it, and confounds, which may be "
        "the true cause of a difference."
    )
    return Table("referee", "What differs between the arms", columns, rows, note, "The arms differ in nothing.")


def failures(report: Report) -> Table:
    rows = [
        [
            # Of an arm without any run that ended nothing else is known.
            arm_cell(f["arm"]) if f["arm"] in report["arms"] else Cell(f["arm"]),
            number_cell(si(f["budget"])),
            number_cell(DASH if f["seed"] is None else str(f["seed"])),
            Cell(values_text(f["values"]), kind="code"),
            Cell(f["reason"] or DASH),
            Cell(str(f["run"]), kind="code"),
        ]
        for f in report["failures"]
    ]
    columns = ["Arm", "Budget (tokens)", "Seed", "Values", "Reason", "Run"]
    note = "A point that failed counts as worse than any that did not."
    return Table("failures", "Failed points", columns, rows, note if rows else "", "No point failed.")


def audits(report: Report) -> Table:
    rows = []
    for a in report["audits"]:
        counted = f"{si(a['steps_compared'])} of {si(a['steps'])}"
        rows.append(
            [
                Cell(str(a["run"]), kind="code"),
                Cell(audit_says(a), kind="verdict"),
                Cell(a["how"] or DASH),
                Cell(", ".join(f"{start} to {end}" for start, end in a["windows"]) or DASH),
                number_cell(counted),
                number_cell(str(a["found"])),
                Cell(a["commit"] or DASH, kind="code"),
                Cell(" ".join(filter(None, [a["device"], a["time"], a["note"]])) or DASH),
            ]
        )
    columns = [
        "Run",
        "Result",
        "Compared",
        "Windows (steps)",
        "Steps trained again",
        "Findings",
        "Commit",
        "Where, when",
    ]
    note = "Windows between checkpoints were trained again, and their losses compared with those on record."
    return Table("audits", "Audits", columns, rows, note, "No run was audited.")


def runs(report: Report) -> Table:
    rows = [
        [
            arm_cell(x["arm"]),
            number_cell(si(x["budget"])),
            number_cell(str(x["seed"])),
            Cell(values_text(x["values"]), kind="code"),
            number_cell(number(x["loss"], 6)),
            number_cell(str(x["step"])),
            Cell(x["rows_hash"] or DASH, kind="code"),
            Cell(str(x["run"]), kind="code"),
        ]
        for x in report["losses"]
    ]
    columns = ["Arm", "Budget (tokens)", "Seed", "Values", f"Loss ({report['unit']})", "Step", "Rows", "Run"]
    return Table("runs", "Runs", columns, rows, "Rows: the hash of the validation rows.", "No run has ended.")


AFTER_THE_FIGURES = (end_loss, speedups, differences, tuning, costs, referee, audits, failures, runs)


def verdicts(report: Report) -> Table:
    """One budget a row: that of the arm's verdict."""
    baseline = report["baseline"]
    rows = []
    for arm in [baseline, *(name for name in report["arms"] if name != baseline)]:
        at, ratios = budget_of(report, arm), speedups_of(report, arm)
        if arm == baseline:
            word = "baseline" if is_tuned(report, arm) else "untuned"
        else:
            word = VERDICTS.get(report["verdicts"].get(arm), DASH)
        rows.append(
            [
                arm_cell(arm),
                Cell(word, kind="verdict"),
                *_at(report, arm, at),
                *(number_cell(ratio(ratios.get(unit))) for unit in UNITS),
                Cell(finding(report, arm)),
            ]
        )
    columns = ["Arm", "Verdict", "Tokens", "End loss", minus(report)]
    columns += [*(f"Speed-up, {words}" for words in UNITS.values()), "In words"]
    note = (
        f"Each row is of one budget, the largest that the arm and {baseline} both have. Loss in {report['unit']}, mean "
        f"over seeds. Speed-up: how many times the arm's tokens, FLOPs or seconds {baseline} needs for the loss that "
        f"the arm ends at, between annealed runs; extrapolated: it, or an end of its interval, lies beyond the budgets "
        f"of {baseline}. In brackets: {percent(report['confidence'])} intervals."
    )
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


def _at(report: Report, arm: str, budget: int | None) -> list[Cell]:
    """The budget, the end loss, and the difference from the baseline there."""
    losses = end_losses(report, arm).get(budget or 0)
    gap = next((d for d in report["differences"] if (d["arm"], d["budget"]) == (arm, budget)), None)
    shown = interval(gap["estimate"], gap["low"], gap["high"]) if gap else DASH
    mean = number(float(np.mean(losses)), 4) if losses else DASH
    return [number_cell(si(budget)), number_cell(mean), number_cell(shown)]


def by_budget(report: Report) -> Table:
    """For a terminal: a row for each arm and budget."""
    rows = []
    for arm in report["arms"]:
        ratios = {s["budget"]: s for s in known_speedups(report, arm, "annealed") if s["unit"] == "tokens"}
        word = "baseline" if arm == report["baseline"] else VERDICTS.get(report["verdicts"].get(arm), DASH)
        for budget in end_losses(report, arm):
            said = word if budget == budget_of(report, arm) else ""
            rows.append([arm_cell(arm), *_at(report, arm, budget), number_cell(ratio(ratios.get(budget))), Cell(said)])
    return Table("by_budget", "", ["Arm", "Tokens", "End loss", minus(report), "Speed-up, tokens", "Verdict"], rows)


def tuning_of_keys(report: Report) -> Table:
    """What was tuned, and what was not: keys that are alike in all arms stand in the first row."""
    of_arms = report["tuning_of_keys"]
    first, *others = (of["not_tuned"] for of in of_arms.values())
    alike = {key: value for key, value in first.items() if all(key in of and of[key] == value for of in others)}
    rows = [[Cell("all arms"), Cell(DASH), Cell(DASH), Cell(values_text(alike), kind="code")]] if alike else []
    for arm, of in of_arms.items():
        tuned = values_text(of["tuned"]) + (f" at {si(of['budget'])} tokens" if of["tuned"] else "")
        own = {key: value for key, value in of["not_tuned"].items() if key not in alike}
        texts = tuned, values_text(of["chosen"]), values_text(own)
        rows.append([arm_cell(arm), *(Cell(text or DASH, kind="code" if text else "") for text in texts)])
    columns = ["Arm", "Tuned here: the values tried", "Chosen beforehand, by hand", "Not tuned"]
    note = (
        "Chosen beforehand: set for the arm, or not what its recipe brings; it may have been "
        "tuned elsewhere. Not tuned: what the recipe brings, but for keys that are null."
    )
    return Table("tuning_of_keys", "What was tuned, and what was not", columns, rows, note)
