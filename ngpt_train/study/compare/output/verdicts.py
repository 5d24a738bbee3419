"""The tables of the first page: verdicts, and which keys were tuned; and the rows of each budget for a terminal."""

from __future__ import annotations

import numpy as np

from ngpt_train.report.rounded import DASH, interval, number, percent, si
from ngpt_train.study.compare.output.series import end_losses
from ngpt_train.study.compare.output.tables import Cell, Table, arm_cell, minus, number_cell
from ngpt_train.study.compare.output.wording import (
    UNITS,
    VERDICTS,
    Report,
    budget_of,
    finding,
    is_tuned,
    known_speedups,
    ratio,
    speedups_of,
    values_text,
)
from ngpt_train.study.compare.versus import POOLED


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
