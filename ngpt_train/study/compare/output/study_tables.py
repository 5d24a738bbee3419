"""Tables of what a study alone has: its coordinate descent and its interactions."""

from ngpt_train.report.rounded import interval, number, si
from ngpt_train.study.compare.output.tables import ARM, CODE, NUMBER, TEXT, Table
from ngpt_train.study.compare.output.wording import Report, short
from ngpt_train.study.definition import LR

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
    several = {x["key"].split(", ")[-1] == LR for x in report.get("descent", ()) if ", " in x["key"]}
    if False in several:
        note += " Several keys: all values at once that alone were better by less than the noise."
    if True in several:
        note += " With the learning rate: a value and a rate beside the best ones together."
    return [Table("descent", "What each key gained", columns, rows, note)] if rows else []


def interactions(report: Report) -> list[Table]:
    """The table of a study's interactions; none where it asks for none."""
    rows = []
    for x in report.get("interactions", ()):
        a, b, c, d = x["arms"]
        state = "resolved" if x["resolved"] else "not resolved"
        state = f"untuned: {', '.join(x['untuned'])}" if x["untuned"] else state
        shown = si(x["budget"]), interval(x["estimate"], x["low"], x["high"]), si(x["n_seeds"])
        rows.append([x["name"], f"({a} less {b}) less ({c} less {d})", *shown, state])
    columns = [("Interaction", TEXT), ("Of the losses of", TEXT), ("Budget (tokens)", NUMBER)]
    columns += [(report["unit"], NUMBER), ("Seeds", NUMBER), ("State", TEXT)]
    note = "Below 0: a gains more on b than c gains on d. Paired by seed and validation row."
    return [Table("interactions", "Interactions", columns, rows, note)] if rows else []
