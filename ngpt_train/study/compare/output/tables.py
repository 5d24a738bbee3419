"""The tables of a report, for report.md and the page. A cell is text; the renderer escapes it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ngpt_train.report.rounded import DASH, interval, number, percent, si
from ngpt_train.study.compare.equal_loss import EXTRAPOLATED, FLATTERS
from ngpt_train.study.compare.intervals import POWER
from ngpt_train.study.compare.output import wording
from ngpt_train.study.compare.output.series import end_losses, losses_by_seed
from ngpt_train.study.compare.output.wording import UNITS, Report, is_known, ratio, values_text
from ngpt_train.study.compare.phrases import BY_OWN_CLOCKS, OWN_NOISE
from ngpt_train.study.definition import LR

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

    def condensed(self) -> Self:
        """Without repetition: what all rows have alike stands in the note, equal columns are one, and a sentence of
        several rows has a letter in its place."""
        if len(self.rows) < 2:
            return self
        kinds, letters, alike, empty = dict(self.columns), dict[str, str](), [], []
        names = dict[tuple[str, ...], list[str]]()  # by the cells of a column
        for (name, kind), cells in zip(self.columns, zip(*self.rows, strict=True), strict=True):
            if name == self.columns[0][0] or len(set(cells)) > 1:
                often = [text for text, n in Counter(cells).items() if kind == TEXT and n > 1 and len(text) > LONG]
                letters |= {text: f"({chr(ord('a') + len(letters) + k)})" for k, text in enumerate(often)}
                names.setdefault(tuple(letters.get(text, text) for text in cells), []).append(name)
            elif cells[0] in ("", DASH):
                empty += [name] if kind != TEXT else []
            else:
                alike.append(f"{name}: {cells[0]}")
        columns = [(" = ".join(of), kinds[of[0]]) for of in names.values()]
        said = [f"In all rows, {'; '.join(alike)}." * bool(alike), f"Empty: {'; '.join(empty)}." * bool(empty)]
        said += [self.note, *(f"{letter} {text}." for text, letter in letters.items())]
        return replace(self, columns=columns, rows=list(zip(*names, strict=True)), note=" ".join(filter(None, said)))


LONG = 30  # characters of a cell that does not stand in several rows


def minus(report: Report) -> tuple[str, str]:
    """Head and kind of the column of differences from the baseline."""
    return f"Minus {report['baseline']} ({report['unit']}; negative: better)", NUMBER


def verdicts(report: Report) -> Table:
    """A row for each arm, at the budget of its verdict."""
    baseline = report["baseline"]
    trends = {trend["arm"]: trend for trend in report["trends"]}
    rows = []
    for arm in _from_baseline(report):
        budget = wording.budget_of(report, arm)
        ratios = {s["unit"]: s for s in wording.known_speedups(report, arm) if s["budget"] == budget}
        word = wording.VERDICTS.get(report["verdicts"].get(arm), DASH)
        if arm == baseline:
            word = "baseline" if wording.is_tuned(report, arm) else "untuned"
        at = at_budget(report, arm, budget)
        if len(report["budgets"]) == 1:
            at[1] = _mean_and_spread(report, end_losses(report, arm).get(report["budgets"][0], []))
        rows.append([arm, word, *at, *(ratio(ratios.get(unit)) for unit in UNITS), ratio(trends.get(arm))])
    columns = [("Arm", ARM), ("Verdict", VERDICT), ("Tokens", NUMBER), ("End loss", NUMBER), minus(report)]
    columns += [*((f"Speed-up, {words}", NUMBER) for words in UNITS.values()), ("Twice the budget", NUMBER)]
    note = f"Each row is of the largest budget that the arm and {baseline} both have. End loss: "
    note += f"{_of_seeds(report)}. " if len(report["budgets"]) == 1 else "mean over seeds. "
    if any(wording.known_speedups(report, arm) for arm in report["arms"]):
        note += (
            f"Speed-up: how many times the arm's tokens, FLOPs or seconds {baseline} needs for the loss that the arm "
            f"ends at, between annealed runs; extrapolated: it, or an end of its interval, lies beyond {baseline}'s "
            "budgets, by a factor of 2 at most. Twice the budget: the factor by which the speed-up in tokens then "
            "changes. "
        )
    note += f"In brackets: {percent(report['confidence'])} intervals."
    if any("price_arm" in d for d in report["differences"]):
        note += " They have the price of the grid (Tuning)."
    if any(s["clock"] == "own" for s in report["speedups"]):
        note += " Seconds by the runs' own clocks are marked in Speed-up."
    if OWN_NOISE in report["notes"]:
        note += f" {OWN_NOISE}"
    if any(d["n_seeds"] == 1 for d in report["differences"]):
        note += " Of an arm with one seed they are without the noise between seeds."
    if (n := len(report["arms"]) - 1) > 1:
        by_chance = percent(round(100 * (1 - report["confidence"] ** n)) / 100)
        note += (
            f" Each holds for itself: if no arm differed from {baseline}, one of the {n} would still be called better "
            f"or worse in up to some {by_chance} of such comparisons."
        )
    return Table("verdicts", "Verdicts", columns, rows, note, "No arm was compared.")


def at_budget(report: Report, arm: str, budget: int | None) -> list[str]:
    """The budget, the end loss, and the difference from the baseline there."""
    losses = end_losses(report, arm).get(budget or 0)
    gap = next((d for d in report["differences"] if (d["arm"], d["budget"]) == (arm, budget)), None)
    shown = interval(gap["estimate"], gap["low"], gap["high"]) if gap else DASH
    return [si(budget), number(float(np.mean(losses)), 4) if losses else DASH, shown]


def tuning_of_keys(report: Report) -> Table:
    """Tuned and untuned keys: of the baseline all, of another arm what differs. What all arms share is in the note."""
    baseline, of_arms, parts = report["baseline"], report["tuning_of_keys"], ("chosen", "not_tuned")
    of_baseline, rows = of_arms[baseline], dict[tuple[str, ...], list[str]]()
    shared = {part: of_baseline[part] for part in parts}
    for of in of_arms.values():
        shared = {part: _without(shared[part], _without(shared[part], of[part])) for part in parts}
    for arm in _from_baseline(report):
        of, usual = of_arms[arm], shared if arm == baseline else of_baseline
        chosen, not_tuned = (values_text(_without(of[part], usual[part])) for part in parts)
        has = {key for part in ("tuned", *parts) for key in of[part]}
        lacks = [f"no {key}" for part in ("tuned", *parts) for key in of_baseline[part] if key not in has]
        not_tuned = ", ".join(filter(None, [not_tuned, *lacks]))
        at = [si(of["budget"]), *(f"{key} {si(x)}" for key, x in of.get("tuned_elsewhere", {}).items())]
        texts = (values_text(of["tuned"]), chosen, not_tuned, ", ".join(at) if of["tuned"] else DASH)
        rows.setdefault(texts, []).append(wording.marked(report, arm))
    words = {"chosen": "Chosen beforehand", "not_tuned": "Not tuned"}
    note = "".join(f"{words[part]} in all arms: {values_text(of)}. " for part, of in shared.items() if of)
    note += (
        f"Of other arms than {baseline} the table has what differs from {baseline}. Chosen beforehand: set for the "
        "arm, or not what its recipe brings; it may have been tuned elsewhere. Not tuned: what the recipe brings, but "
        "for keys that are null."
    )
    names = ("Tuned here: the values tried", "Chosen beforehand, by hand", "Not tuned")
    columns = [("Arms", TEXT), *((name, CODE) for name in names), ("Tuned at (tokens)", NUMBER)]
    shown = [[", ".join(arms), *texts] for texts, arms in rows.items()]
    return Table("tuning_of_keys", "What was tuned, and what was not", columns, shown, note)


def _without(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that `others` lacks, or has with another value."""
    return {key: value for key, value in some.items() if key not in others or others[key] != value}


def _from_baseline(report: Report) -> list[str]:
    """The arms, the baseline first."""
    return [report["baseline"], *(name for name in report["arms"] if name != report["baseline"])]


def end_loss(report: Report) -> Table:
    """Empty with one budget, whose end losses stand in the table of verdicts."""
    budgets, rows = sorted(report["budgets"]), []
    for arm in report["arms"] if len(budgets) > 1 else ():
        losses = end_losses(report, arm)
        rows.append([arm, *(_mean_and_spread(report, losses.get(budget, [])) for budget in budgets)])
    note = f"{report['unit']}; {_of_seeds(report)}, at the best values tried."
    columns = [("Arm", ARM), *((f"{si(budget)} tokens", NUMBER) for budget in budgets)]
    return Table("end_loss", "End loss", columns, rows, note, "Of one budget: see Verdicts.")


def _counts(report: Report) -> set[int]:
    """Numbers of seeds at the best values."""
    return {len(losses) for arm in report["arms"] for losses in end_losses(report, arm).values()}


def _of_seeds(report: Report) -> str:
    counts = _counts(report)
    many = f"{counts.pop()} seeds" if len(counts) == 1 else "the seeds (how many)"
    return f"mean ± standard deviation over {many}"


def _mean_and_spread(report: Report, losses: list[float]) -> str:
    if not losses:
        return DASH
    spread = f" ± {number(float(np.std(losses, ddof=1)), 4)}" if len(losses) > 1 else ""
    return f"{number(float(np.mean(losses)), 4)}{spread}" + f" ({len(losses)})" * (len(_counts(report)) > 1)


def differences(report: Report) -> Table:
    """Without the differences themselves if there is one budget: these stand in the table of verdicts."""
    rows, several = [], len(report["budgets"]) > 1
    for d in report["differences"]:
        ways = [f"{si(n)} {name}" for name, n in (d.get("needed") or {}).items() if n is not None]
        noise = [d.get(name) for name in ("noise_seeds", "noise_rows", "detectable")]
        shown = [si(d["n_seeds"]), si(d["n_rows"])]
        if several:
            noise.insert(0, _apart(report, d["arm"], d["budget"]))
            shown.append(interval(d["estimate"], d["low"], d["high"]))
        texts = [*shown, *(number(x, None, 2) for x in noise), " or ".join(ways) or DASH]
        rows.append([d["arm"], si(d["budget"]), *texts])
    names = [f"Minus {report['baseline']}", "Between seeds"] if several else []
    names = ["Budget (tokens)", "Seeds", "Rows", *names, "Noise of seeds", "Noise of rows", "Resolvable", "Needed"]
    note = f"Paired by seed and validation row; {report['unit']}. "
    if several:
        note += "Between seeds: standard deviation of the difference at this budget. "
    note += (
        f"Noise: standard error of the difference from seeds{', mostly of this budget alone,' * several} and from "
        "validation rows beyond what differs with the seed. Resolvable: the difference that so many seeds and rows "
        f"resolve in {percent(POWER)} of the cases. Needed: what would each alone resolve the difference found as "
        f"often; {DASH}: "
        "it is resolved, or no reasonable number would, or one seed does not show the noise."
    )
    columns = [("Arm", ARM), *((name, NUMBER) for name in names)]
    return Table("differences", "Differences and their noise", columns, rows, note, "No two arms share a budget.")


def _apart(report: Report, arm: str, budget: int) -> float | None:
    """The standard deviation, between seeds, of the difference from the baseline."""
    one, other = (losses_by_seed(report, name).get(budget, {}) for name in (arm, report["baseline"]))
    pairs = [(one[seed], other[seed]) for seed in one if seed in other]
    pairs = pairs or list(zip(one.values(), other.values(), strict=False))
    return float(np.std([a - b for a, b in pairs], ddof=1)) if len(pairs) > 1 else None


def speedups(report: Report) -> Table:
    """A row for each arm and budget, between annealed runs, or within one schedule if no other ratio is known. Unknown
    ratios are sentences of the note."""
    groups, unknown = dict[tuple[str, str, int], list[Any]](), dict[tuple[str, str, str], dict[str, None]]()
    annealed = {(s["arm"], s["budget"]) for s in report["speedups"] if s["how"] == "annealed" and is_known(s)}
    for s in report["speedups"]:
        if s["how"] == "annealed" or (s["arm"], s["budget"]) not in annealed:
            groups.setdefault((s["arm"], s["how"], s["budget"]), []).append(s)
    rows = []
    for (arm, how, budget), entries in groups.items():
        remarks = _remarks(entries)
        if any(is_known(s) for s in entries):
            ratios = {s["unit"]: ratio(s) if is_known(s) else DASH for s in entries}
            clocks = ", ".join(dict.fromkeys(s["clock"] for s in entries if s["clock"] and is_known(s)))
            shown = (ratios.get(unit, DASH) for unit in UNITS)
            rows.append([arm, wording.HOW[how], si(budget), *shown, clocks or DASH, remarks or DASH])
        else:
            unknown.setdefault((wording.HOW[how], si(budget), remarks), {})[arm] = None
    said = []
    for (in_words, at, why), arms in unknown.items():
        whose = "any arm" if len(arms) == len(report["arms"]) - 1 > 1 else ", ".join(arms)
        said.append(f"No ratio {in_words} at {at} tokens for {whose}{f': {why}' if why else ''}.")
    note = "How many times the arm's tokens, FLOPs or seconds the baseline needs."
    if any(row[1] == wording.HOW["within_schedule"] for row in rows):
        note += (
            " A ratio within one schedule, for the loss that the worse of the two ends at, stands here where no other"
        )
        note += " is known, and is no verdict: it flatters the arm whose learning rate decays faster."
    note += " The intervals have the noise of the losses, and not the error of the form that is fitted."
    note = " ".join([note, *said])
    columns = [("Arm", ARM), ("How", TEXT), ("Budget (tokens)", NUMBER), *((unit, NUMBER) for unit in UNITS.values())]
    columns += [("Clock of the seconds", TEXT), ("Remarks", TEXT)]
    empty = " ".join(["No loss of the baseline was matched.", *said])
    return Table("speedups", "Speed-up", columns, rows, note, empty)


def _remarks(entries: Sequence[Mapping[str, Any]]) -> str:
    """The notes of the entries, which differ in their unit. A note begins with its units, unless all have it."""
    units = dict[str, list[str]]()
    for s in entries:
        for note in (s["note"] or "").split("; "):
            said = note in ("", FLATTERS) or (note == EXTRAPOLATED and is_known(s))
            if not said and not note.startswith(BY_OWN_CLOCKS):
                units.setdefault(note, []).append(UNITS[s["unit"]])
    return "; ".join(note if len(of) == len(entries) else f"{', '.join(of)}: {note}" for note, of in units.items())


def tuning(report: Report) -> Table:
    rows = []
    for t in report["tuning"]:
        if t["state"] == "not tried" and t["key"] != LR:  # at another budget, or for other arms alone
            continue
        failed = sum(bool(point["failed"]) for point in t["points"])
        chosen = report["arms"][t["arm"]]["best_by_budget"].get(str(t["budget"]), {}).get(t["key"])
        state = "bracketed" if t["state"] == "bracketed" else f"untuned ({t['state']})"
        points = f"{len(t['points'])}" + (f", {failed} failed" if failed else "")
        found = (state, wording.short(chosen), _optimum(t), number(t["price_of_grid"], 4), points)
        rows.append([t["arm"], si(t["budget"]), t["key"], *found])
    columns = [("Arm", ARM), ("Budget (tokens)", NUMBER), ("Key", CODE), ("State", VERDICT)]
    names = ["Best tried", "Optimum of the parabola", "Price of the grid", "Points tried"]
    columns += [(name, NUMBER) for name in names]
    note = (
        "Bracketed: on both sides some rate tried is worse than the best, by more than the noise between seeds; of "
        "another key, some value tried is not better by more than the noise. "
        f"Price of the grid ({report['unit']}): by how much the parabola's loss at the best value lies above its "
        "lowest one. The best is chosen by the runs that are then compared, which flatters each arm by a part of its "
        "noise."
    )
    return Table("tuning", "Tuning", columns, rows, note, "No key was tuned.")


def _optimum(entry: Mapping[str, Any]) -> str:
    optimum, low, high = (number(entry[name], None, 3) for name in ("optimum", "low", "high"))
    return optimum + (f" ({low} to {high})" if DASH not in (optimum, low, high) else "")


def costs(report: Report) -> Table:
    """A step's time by the run's own clock, which depends on the load of the machine, only where no other is known."""
    rows = []
    for c in report["costs"]:
        counts = (si(c[name]) for name in ("n_params", "flops_per_token"))
        times = _ms(c["step_time"]), c["step_time_how"] or DASH
        rows.append([c["arm"], *counts, number(c["memory_gb"], None, 3), *times])
    names = ["Parameters", "FLOPs per token", "Peak memory (GB)", "Step time (ms)", "Clock"]
    columns = [("Arm", ARM), *((name, NUMBER) for name in names)]
    note = "Peak memory is of a GPU's tensors; on a CPU it is of the whole process,"
    note += " the preparation of its data included."
    return Table("costs", "Memory and step time", columns, rows, note, "No costs are known.")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    return number(1000 * seconds, 0) if seconds >= 0.1 else number(1000 * seconds, None, 3)


def referee(report: Report) -> Table:
    """Differences with equal values, size and note share a row."""
    words = {"confound": "confound", "under_test": "under test", "follows": "follows"}
    tuned = {key for of in report["tuning_of_keys"].values() for key in of["tuned"]}
    rows = []
    found = wording.alike(wording.differing(report))
    for keys, entry in sorted(found, key=lambda one: list(words).index(one[1]["kind"])):
        values = "in Tuning" if keys[0] in tuned and entry["kind"] == "follows" else wording.values_in_arms(entry)
        note = "; ".join(filter(None, [wording.size_text(entry["size"]), entry["note"]])) or DASH
        rows.append([words[entry["kind"]], ", ".join(keys), values, note])
    columns = [("Kind", VERDICT), ("What differs", CODE), ("Values", TEXT), ("Size, note", TEXT)]
    note = "Every way in which two arms differ: the thing under test, what follows from it, and confounds,"
    note += " which may be the true cause of a difference."
    return Table("referee", "What differs between the arms", columns, rows, note, "The arms differ in nothing.")


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
        says = (wording.audit_says(a), a["how"] or DASH, windows, counted)
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
