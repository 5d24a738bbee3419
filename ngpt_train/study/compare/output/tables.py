"""The tables of a report, which report.md and the page both show. A cell is text; a renderer escapes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngpt_train.study.compare.output.series import end_losses
from ngpt_train.study.compare.output.wording import (
    DASH,
    HOW,
    UNITS,
    VERDICTS,
    Report,
    arms_and_values,
    audit_says,
    difference_of,
    finding,
    interval,
    is_tuned,
    label,
    number,
    percent,
    si,
    size_text,
    speedup_of,
    values_text,
)
from ngpt_train.study.compare.statistics.power import POWER


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


def _arm(name: str) -> Cell:
    return Cell(name, arm=name)


def _n(text: str) -> Cell:
    return Cell(text, kind="number")


def verdicts(report: Report) -> Table:
    unit, baseline = report["unit"], report["baseline"]
    rows = []
    for arm in [baseline, *(name for name in report["arms"] if name != baseline)]:
        losses = end_losses(report, arm)
        mean = number(float(np.mean(losses[max(losses)])), 4) if losses else DASH
        if losses and max(losses) != max(report["budgets"]):
            mean = f"{mean} at {si(max(losses))}"
        gap = difference_of(report, arm)
        ratios = [speedup_of(report, arm, u) or {} for u in UNITS]
        verdict = report["verdicts"].get(arm)
        if arm == baseline:
            shown = Cell("baseline" if is_tuned(report, arm) else "untuned", kind="verdict")
        else:
            shown = Cell(VERDICTS.get(verdict, DASH), kind="verdict")
        rows.append(
            [
                _arm(arm),
                shown,
                _n(mean),
                _n(interval(gap["estimate"], gap["low"], gap["high"]) if gap else DASH),
                *(_n(interval(r.get("estimate"), r.get("low"), r.get("high"))) for r in ratios),
                Cell(finding(report, arm)),
            ]
        )
    budget = si(max(report["budgets"], default=None))
    columns = ["Arm", "Verdict", f"End loss at {budget} tokens", f"Difference from {baseline} ({unit})"]
    columns += ["Speed-up, tokens", "Speed-up, FLOPs", "Speed-up, seconds", "In words"]
    note = (
        f"Loss in {unit}, mean over seeds. Speed-up: how many times the arm's tokens, FLOPs or seconds "
        f"{baseline} needs for the loss that the arm ends at, between annealed runs, at the largest budget where that "
        f"is known from inside the budgets of {baseline}. Difference: at the largest budget that both have. The "
        f"sentences name these budgets. In brackets: {percent(report['confidence'])} intervals."
    )
    if any(d["n_seeds"] == 1 for d in report["differences"]):
        note += " Of an arm with one seed they are without the noise between seeds."
    if (n := len(report["arms"]) - 1) > 1:
        by_chance = percent(round(100 * (1 - report["confidence"] ** n)) / 100)
        note += (
            f" Each holds for itself: if none of the {n} arms differed from {baseline}, at least one would still be "
            f"called better or worse in up to some {by_chance} of such comparisons."
        )
    return Table("verdicts", "Verdicts", columns, rows, note, "No arm was compared.")


def end_loss(report: Report) -> Table:
    budgets = sorted(report["budgets"])
    rows = []
    for arm in report["arms"]:
        losses = end_losses(report, arm)
        rows.append([_arm(arm), *(_n(_mean_and_spread(losses.get(budget, []))) for budget in budgets)])
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
                _arm(d["arm"]),
                _n(si(d["budget"])),
                _n(interval(d["estimate"], d["low"], d["high"])),
                _n(number(d["noise_seeds"], None, 2)),
                _n(number(d["noise_rows"], None, 2)),
                _n(si(d["n_seeds"])),
                _n(si(d["n_rows"])),
                _n(number(d.get("detectable"), None, 2)),
                _n(si(needed.get("seeds"))),
                _n(si(needed.get("rows"))),
                _n(si(needed.get("steps"))),
            ]
        )
    columns = ["Arm", "Budget (tokens)", f"Difference ({report['unit']})", "Noise of seeds", "Noise of rows"]
    columns += ["Seeds", "Rows", "Resolvable", "Seeds needed", "Rows needed", "Steps needed"]
    note = (
        f"Arm less {report['baseline']}, paired by seed and validation row; all in {report['unit']}. Noise: standard "
        "error of the difference that comes from seeds, and from validation rows beyond what differs with the seed, "
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
        beyond = "beyond the budgets of the fit" if s["extrapolated"] else ""
        remarks = ". ".join(filter(None, [s["note"] or beyond, s["clock"] and f"clock: {s['clock']}"]))
        rows.append(
            [
                _arm(s["arm"]),
                Cell(UNITS[s["unit"]]),
                Cell(HOW[s["how"]]),
                _n(si(s["budget"])),
                _n(interval(s["estimate"], s["low"], s["high"])),
                Cell(remarks or DASH),
            ]
        )
    for (how, budget, why), arms in unknown.items():
        whose = "all arms" if len(arms) == len(report["arms"]) - 1 > 1 else ", ".join(arms)
        rows.append([Cell(whose), Cell(DASH), Cell(HOW[how]), _n(budget), _n(DASH), Cell(why)])
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
        best = report["arms"][t["arm"]].get("best_by_budget") or {}
        chosen = (best.get(str(t["budget"])) or best.get(t["budget"]) or report["arms"][t["arm"]]["best"]).get(t["key"])
        rows.append(
            [
                _arm(t["arm"]),
                _n(si(t["budget"])),
                Cell(t["key"], kind="code"),
                Cell("bracketed" if t["state"] == "bracketed" else f"untuned ({t['state']})", kind="verdict"),
                _n(f"{chosen:.4g}" if type(chosen) is float else str(chosen)),
                _n(_optimum(t)),
                _n(number(t["price_of_two"], 4)),
                _n(number(t["price_of_grid"], 4)),
                _n(tried),
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
                _arm(c["arm"]),
                _n(si(c["n_params"])),
                _n(si(c["n_params_without_embeddings"])),
                _n(si(c["flops_per_token"])),
                _n(number(c["memory_gb"], None, 3)),
                _n(_ms(c["step_time"]) + how),
                _n(_ms(c.get("step_time_own"))),
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
    return Table("costs", "Memory and step time", columns, rows, empty="No costs are known.")


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
            _arm(f["arm"]) if f["arm"] in report["arms"] else Cell(f["arm"]),
            _n(si(f["budget"])),
            _n(DASH if f["seed"] is None else str(f["seed"])),
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
    for a in report.get("audits") or []:
        counted = f"{si(a['steps_compared'])} of {si(a['steps'])}"
        rows.append(
            [
                Cell(str(a["run"]), kind="code"),
                Cell(audit_says(a), kind="verdict"),
                Cell(a["how"] or DASH),
                Cell(", ".join(f"{start} to {end}" for start, end in a["windows"]) or DASH),
                _n(counted),
                _n(str(a["found"])),
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
            _arm(x["arm"]),
            _n(si(x["budget"])),
            _n(str(x["seed"])),
            Cell(values_text(x["values"]), kind="code"),
            _n(number(x["loss"], 6)),
            _n(str(x["step"])),
            Cell(x["rows_hash"] or DASH, kind="code"),
            Cell(str(x["run"]), kind="code"),
        ]
        for x in report["losses"]
    ]
    columns = ["Arm", "Budget (tokens)", "Seed", "Values", f"Loss ({report['unit']})", "Step", "Rows", "Run"]
    return Table("runs", "Runs", columns, rows, "Rows: the hash of the validation rows.", "No run has ended.")


AFTER_THE_FIGURES = (end_loss, speedups, differences, tuning, costs, referee, audits, failures, runs)
