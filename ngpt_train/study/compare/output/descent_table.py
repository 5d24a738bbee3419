"""The table of a study's coordinate descent."""

from __future__ import annotations

from ngpt_train.report.rounded import number, si
from ngpt_train.study.compare.output.tables import ARM, CODE, NUMBER, TEXT, Table
from ngpt_train.study.compare.output.wording import Report, short

STATES = {"gained": "gained", "within_noise": "not more than the noise", "out_of_runs": "out of runs"}


def descents(report: Report) -> list[Table]:
    """The phases, in a table; none where the learning rate alone was tuned."""
    rows = []
    for x in report.get("descent", ()):
        values = short(x["start"]), short(x["end"])
        numbers = number(x["gain"], 4), number(x["noise"], 4), str(x["n_seeds"]), str(x["runs"])
        rows.append([x["arm"], si(x["budget"]), x["key"], *values, *numbers, STATES[x["state"]]])
    columns = [("Arm", ARM), ("Budget (tokens)", NUMBER), ("Key", CODE), ("From", NUMBER), ("To", NUMBER)]
    names = [f"Gain ({report['unit']})", "Noise between seeds", "Seeds", "Runs"]
    columns += [*((name, NUMBER) for name in names), ("State", TEXT)]
    note = (
        "In order: the learning rate, then each further key with the others fixed, then the rate again, until no key "
        "gains more than the noise. Gain: the mean over the shared seeds by which the end loss fell from the first "
        "value to the last. Where nothing was gained, To is the best value tried beside it."
    )
    return [Table("descent", "What each key gained", columns, rows, note)] if rows else []
