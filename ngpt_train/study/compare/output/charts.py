"""The figures of a report. The page draws each with all its choices; PICTURES are files of some choices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.report.page.chart import Axis, Chart, Choice, Mark, Plot, Style, rows, styles
from ngpt_train.report.page.pictures import Picture, write_picture
from ngpt_train.report.rounded import interval, percent, si
from ngpt_train.study.compare.output import series
from ngpt_train.study.compare.output.wording import HOW, UNITS, Report, budget_of, label, ratio, short

LARGEST = "largest"  # an option among the budgets: each arm's own largest


def looks_of(report: Report) -> dict[str, Style]:
    return styles(report["arms"], report["baseline"])


def _chart(
    report: Report, name: str, title: str, note: str, plots: list[Plot], choices: Sequence[Choice], legend: bool = True
) -> Chart:
    """legend: True adds a choice of the arms."""
    looks = looks_of(report)
    chart = Chart(name, title, note, plots, looks, {arm: label(report, arm) for arm in looks}, list(choices))
    if legend:
        chart.choices.insert(0, chart.choice_of_arms("Arms"))
    return chart


def _units(name: str, words: str, shown: Iterable[str]) -> Choice:
    return Choice(name, words, {unit: UNITS[unit] for unit in shown}, many=False)


def _budgets(report: Report) -> dict[str, str]:
    return {str(budget): si(budget) for budget in sorted(report["budgets"], reverse=True)}


def _strength(report: Report, budget: int) -> float:
    """The opacity of a budget's curve: larger budgets are less transparent."""
    budgets = sorted(report["budgets"])
    return 0.45 + 0.55 * (budgets.index(budget) + 1) / len(budgets) if budget in budgets else 1.0


def _over_budgets(report: Report, title: str, **more: Any) -> Axis:
    return Axis(title, log=True, ticks={float(b): si(b) for b in sorted(report["budgets"])}, **more)


def speedup(report: Report) -> Chart:
    marks, shown, baseline = [], set[str](), report["baseline"]
    for arm, unit, how in product(looks_of(report), UNITS, HOW):
        if entries := series.speedups(report, arm, unit, how):
            marks += _ratios(report, arm, {"unit": unit, "how": how}, entries)
            shown |= {unit, how}
    ends = [value for mark in marks for value in mark.y if value] or [1.0]
    ticks = {tick: f"{tick:g}" for tick in series.ratio_ticks(ends)}
    span = min([*ends, 0.9]) * 0.95, max([*ends, 1.1]) * 1.05
    units, hows = ([name for name in names if name in shown] for names in (UNITS, HOW))
    titles = {unit: f"times the {words} that {baseline} needs" for unit, words in UNITS.items()}
    times = [Axis(title, {"unit": unit}, True, ticks, span, rule=1) for unit, title in titles.items()]
    note = (
        f"How many times the arm's tokens, FLOPs or seconds {baseline} needs for the loss that the arm ends "
        f"at; bands are {percent(report['confidence'])} intervals. Above 1 the arm is ahead. Hollow: untuned, or "
        f"beyond the budgets of the fit; an arrow: that end of the interval is open. Within one schedule "
        f"the loss is that of the worse of the two, and the ratio flatters the arm whose learning rate decays faster."
    )
    plots = [Plot(marks, [_over_budgets(report, "budget (tokens of the arm)")], times)]
    choices = [_units("unit", "Counted in", units), Choice("how", "Matched", {how: HOW[how] for how in hows}, False)]
    return _chart(report, "speedup", "Speed-up against budget", note, plots, choices)


def _ratios(report: Report, arm: str, when: Mapping[str, str], entries: list[Mapping[str, Any]]) -> list[Mark]:
    """A band for known intervals, an arrow for an open end, and the estimates on top."""
    marks = []
    closed = [s for s in entries if s["low"] is not None and s["high"] is not None]
    if len(closed) > 1:
        budgets, low, high = ([s[key] for s in closed] for key in ("budget", "low", "high"))
        marks.append(Mark(arm, budgets + budgets[::-1], low + high[::-1], when, area=True, opacity=0.16))
    marks += [Mark(arm, [s["budget"]] * 2, [s["low"], s["high"]], when, line=1.5) for s in closed]
    for known, other, factor, symbol in (("high", "low", 1 / 1.12, "v"), ("low", "high", 1.12, "^")):
        for s in [s for s in entries if s[other] is None and s[known] is not None]:
            ends = [s[known], s["estimate"] * factor]
            marks.append(Mark(arm, [s["budget"]] * 2, ends, when, line=1.5, size=9, only_last=True, symbol=symbol))
    hollow = [s["extrapolated"] or not series.state_at(report, arm, s["budget"]) for s in entries]
    texts = ["\n".join(filter(None, [f"{ratio(s)} times", s["note"]])) for s in entries]
    at, estimates = [s["budget"] for s in entries], [s["estimate"] for s in entries]
    hover = "{arm}\n{x:si} tokens: {text}"
    return [*marks, Mark(arm, at, estimates, when, hover, texts, line=2, size=9, hollow=hollow)]


def difference(report: Report) -> Chart:
    """A row for each arm."""
    found = [entry for entry in report["differences"] if entry["estimate"] is not None]
    budgets = {str(budget): si(budget) for budget in sorted({entry["budget"] for entry in found}, reverse=True)}
    arms = [arm for arm in looks_of(report) if any(entry["arm"] == arm for entry in found)]
    baseline, marks = label(report, report["baseline"]), []
    for entry in found:
        arm, row = entry["arm"], arms.index(entry["arm"])
        largest = (LARGEST,) * (entry["budget"] == budget_of(report, arm))
        when = {"budget": (str(entry["budget"]), *largest)}
        if entry["low"] is not None and entry["high"] is not None:
            marks.append(Mark(arm, [entry["low"], entry["high"]], [row, row], when, line=2))
        solid = all(series.state_at(report, name, entry["budget"]) for name in (arm, report["baseline"]))
        shown = interval(entry["estimate"], entry["low"], entry["high"])
        hover = f"{{arm}}, {si(entry['budget'])} tokens\n{shown} {report['unit']}"
        point: dict[str, Any] = {"size": 9, "hollow": [not solid], "label": shown}
        marks.append(Mark(arm, [entry["estimate"]], [row], when, hover, **point))
    note = f"Left of the line an arm's loss is lower than that of {baseline}. Bars are {percent(report['confidence'])} "
    note += f"intervals. Hollow: the arm or {report['baseline']} is untuned at that budget."
    x = Axis(f"end loss minus that of {baseline} ({report['unit']})", rule=0, least=0)
    y = rows([label(report, arm) for arm in arms])
    plots = [Plot(marks, [x], [y], height=90 + 38 * len(arms))]
    options = {LARGEST: "largest of both", **budgets} if len(budgets) > 1 else budgets
    choices = [Choice("budget", "Budget (tokens)", options, many=False)]
    return _chart(report, "difference", "Difference from the baseline", note, plots, choices, legend=False)


def end_loss(report: Report) -> Chart:
    marks, unit = [], report["unit"]
    axes = series.axes_of(report)
    for arm in looks_of(report):
        losses = series.end_losses(report, arm)
        for axis in axes:
            at = {budget: series.cost_of(report, arm, budget, axis) for budget in losses}
            if not losses or None in at.values():
                continue
            when, hover = {"axis": axis}, f"{{arm}}\n{{x:si}} {UNITS[axis]}: {{y:4f}} {unit}"
            seeds = [(at[budget], loss) for budget, of_seeds in losses.items() for loss in of_seeds]
            x, y = zip(*seeds, strict=True)
            marks.append(Mark(arm, x, y, when, f"{hover}, one seed", size=5, opacity=0.45))
            hollow = [not series.state_at(report, arm, budget) for budget in losses]
            means = [float(np.mean(of_seeds)) for of_seeds in losses.values()]
            fit = series.fit(report, arm)
            more: dict[str, Any] = {"size": 9, "hollow": hollow, "line": 0 if fit else 1.5, "dotted": True}
            marks.append(Mark(arm, list(at.values()), means, when, f"{hover}, mean over seeds", **more))
            if fit:
                rate = series.cost_of(report, arm, 1.0, axis) or 1.0
                marks.append(Mark(arm, [rate * x for x in fit[0]], fit[1], when, line=2))
    for axis in axes:
        for arm, start, end, loss in series.arrows(report, axis):
            hover = f"{{arm}}: {report['baseline']} needs {end / start:.3g} times the {UNITS[axis]}"
            tip: dict[str, Any] = {"line": 1, "size": 8, "only_last": True, "symbol": ">" if end > start else "<"}
            when = {"axis": axis, "part": "arrows"}
            marks.append(Mark(arm, [start, end], [loss, loss], when, hover, opacity=0.8, **tip))
    over = [Axis(series.axis_title(report, axis), {"axis": axis}, log=True) for axis in axes if axis != "tokens"]
    over.insert(0, _over_budgets(report, series.axis_title(report, "tokens"), when={"axis": "tokens"}))
    note = (
        f"Each run is annealed to its end. Large: mean over seeds; small: one seed; hollow: untuned. Solid: the "
        f"monotone fit through {report['baseline']}'s end losses. An arrow leads from an arm's end to where "
        f"{report['baseline']} has the same loss."
    )
    choices = [_units("axis", "Over", axes)]
    if any("part" in mark.when for mark in marks):
        choices.append(Choice("part", "Show", {"arrows": "matched loss"}))
    plots = [Plot(marks, over, [Axis(f"end loss ({unit})")])]
    return _chart(report, "end-loss", "End loss against budget", note, plots, choices)


def curves(report: Report) -> Chart:
    axes, marks = series.axes_of(report), []
    ranges: dict[bool, list[float]] = {True: [], False: []}  # of curves at the best values, and of all
    for curve in report["curves"]:
        arm, budget, evals, train = curve["arm"], curve["budget"], curve["eval"], curve["train"]
        when = {"budget": str(budget), "seed": str(curve["seed"]), "rate": "best" if curve["best"] else "other"}
        head = f"{{arm}}, {si(budget)} tokens, seed {curve['seed']}\n"
        values = ", ".join(f"{key}={value}" for key, value in curve["values"].items())
        hollow = [not series.state_at(report, arm, budget)] * len(evals["loss"])
        of_evals: dict[str, Any] = {"size": 8, "only_last": True, "opacity": _strength(report, budget)}
        of_evals |= {"hollow": hollow if any(hollow) else ()}
        for axis in axes:
            at = when | {"axis": axis}
            if any(x := series.eval_axis(report, curve, axis)):
                hover = f"{head}{values}\nvalidation {{y:4f}} {report['unit']} at {{x:si}}"
                marks.append(Mark(arm, x, evals["loss"], at | {"data": "validation"}, hover, line=1.8, **of_evals))
            if train["tokens"] and report["metric"] == "loss" and any(x := series.train_axis(report, curve, axis)):
                hover = f"{head}training {{y:4f}} at {{x:si}}"
                marks.append(Mark(arm, x, train["loss"], at | {"data": "training"}, hover, line=0.8, opacity=0.5))
        known = [(t, loss) for t, loss in zip(evals["tokens"], evals["loss"], strict=True) if loss is not None]
        # The first tenth of a curve is steep, and would flatten the rest.
        for which in (True, False) if curve["best"] else (False,):
            ranges[which] += [loss for t, loss in known if t >= 0.1 * budget] or [loss for _, loss in known]
    of_loss = f"loss ({report['unit']})"
    y = [Axis(of_loss, {"rate": "other"}, range=_spread(ranges[False])), Axis(of_loss, range=_spread(ranges[True]))]
    over = [
        Axis(series.axis_title(report, axis), {"axis": axis, "scale": scale}, log=scale == "log", least=least)
        for axis in axes
        for scale, least in (("linear", 0), ("log", None))
    ]
    seeds = sorted({curve["seed"] for curve in report["curves"]})
    choices = [
        _units("axis", "Over", axes),
        Choice("budget", "Budget (tokens)", _budgets(report)),
        Choice("seed", "Seed", {str(seed): str(seed) for seed in seeds}),
        Choice("data", "Loss", {"validation": "validation", "training": "training"}, first=("validation",)),
        Choice("scale", "Axis", {"linear": "linear", "log": "logarithmic"}, many=False),
    ]
    if any(not curve["best"] for curve in report["curves"]):
        rates = {"best": "best tried", "other": "others tried"}
        choices.insert(3, Choice("rate", "Tuned values", rates, first=("best",)))
    note = "One curve a run, with a marker at its end. Paler: a smaller budget. Hollow marker: untuned at that budget."
    return _chart(report, "curves", "Loss curves", note, [Plot(marks, over, y, height=480)], choices)


def _spread(losses: list[float]) -> tuple[float, float] | None:
    if not losses:
        return None
    pad = 0.05 * (max(losses) - min(losses)) or 0.05
    return min(losses) - pad, max(losses) + pad


def tuning(report: Report) -> Chart:
    """A plot for each arm."""
    plots = []
    keys = list(dict.fromkeys(entry["key"] for entry in report["tuning"]))
    for arm in looks_of(report):
        marks, over = [], []
        for key in keys:
            entries = [x for x in report["tuning"] if (x["arm"], x["key"]) == (arm, key) and x["points"]]
            over.append(_axis_of_values(key, entries))
            marks += [mark for entry in entries for mark in _tuning_curve(report, entry, over[-1])]
        if marks:
            plots.append(Plot(marks, over, [Axis(f"end loss ({report['unit']})")], label(report, arm), height=320))
    note = (
        "End loss against the value tried, a curve for each budget (paler: smaller), with the parabola in its log; "
        "the bar at its lowest point is the interval of the optimum. Hollow: not bracketed, so untuned. A cross above "
        "the curve: the point failed."
    )
    choices = [Choice("budget", "Budget (tokens)", _budgets(report)), _keys(keys)]
    return _chart(report, "tuning-curves", "Tuning of each arm", note, plots, choices, legend=False)


def _keys(keys: Sequence[str]) -> Choice:
    return Choice("key", "Tuned key", {key: key for key in keys}, many=False)


def _axis_of_values(key: str, entries: Sequence[Mapping[str, Any]]) -> Axis:
    """The tried values on a logarithmic axis, or, if one has no logarithm, at equal distances."""
    values = list(dict.fromkeys(point["value"] for entry in entries for point in entry["points"]))
    if not all(map(series.is_numeric, entries)):
        return Axis(key, {"key": key}, ticks={k: str(v) for k, v in enumerate(values)}, range=(-0.5, len(values) - 0.5))
    few = sorted(values)[:: len(values) // 8 + 1]
    span = (min(values) / 1.25, max(values) * 1.25) if values else None
    return Axis(key, {"key": key}, log=True, ticks={float(v): f"{v:.2g}" for v in few}, range=span)


def _tuning_curve(report: Report, entry: Mapping[str, Any], axis: Axis) -> list[Mark]:
    places = {text: place for place, text in axis.ticks.items()}

    def at(value: Any) -> float:
        return float(value) if axis.log else places[str(value)]

    when, averaged, parabola = {"budget": str(entry["budget"]), "key": entry["key"]}, series.means(entry), None
    mark = partial(Mark, entry["arm"], when=when)
    strength, marks = _strength(report, entry["budget"]), []
    if averaged:
        x, y = [at(value) for value, _ in averaged], [loss for _, loss in averaged]
        parabola = series.parabola(entry)
        hollow = [entry["state"] != "bracketed"] * len(x)
        texts = [short(value) for value, _ in averaged]
        hover = f"{{arm}}, {si(entry['budget'])} tokens\n{{text}}: {{y:4f}} {report['unit']}"
        more: dict[str, Any] = {"line": 1 if parabola else 1.5, "dotted": bool(parabola), "opacity": strength}
        more |= {"size": 8, "hollow": hollow, "label": si(entry["budget"])}
        marks.append(mark(x, y, hover=hover, texts=texts, **more))
    if parabola:
        marks.append(mark(*parabola, line=2, opacity=strength))
        if entry["low"] is not None and entry["high"] is not None:
            hover = f"optimum {entry['optimum']:.3g} ({entry['low']:.3g} to {entry['high']:.3g})"
            ends = [entry["low"], entry["high"]]
            marks.append(mark(ends, [min(parabola[1])] * 2, hover=hover, line=6, opacity=0.35))
    if failed := [point["value"] for point in entry["points"] if point["failed"]]:
        top = [max([loss for _, loss in averaged], default=0.0)] * len(failed)
        cross: dict[str, Any] = {"size": 9, "symbol": "X", "opacity": strength}
        cross |= {"hover": "{text}: failed", "texts": list(map(short, failed))}
        marks.append(mark([at(value) for value in failed], top, **cross))
    return marks


def sensitivity(report: Report) -> Chart:
    marks = []
    keys = list(dict.fromkeys(entry["key"] for entry in report["tuning"] if series.is_numeric(entry)))
    known = [(entry, found) for entry in report["tuning"] if (found := series.sensitivity(entry))]
    for entry, (x, y) in known:
        of_arm = [of["budget"] for of, _ in known if (of["arm"], of["key"]) == (entry["arm"], entry["key"])]
        largest = (LARGEST,) * (entry["budget"] == max(of_arm))
        when = {"budget": (str(entry["budget"]), *largest), "key": entry["key"]}
        hover = f"{{arm}}, {si(entry['budget'])} tokens\n{{text}}: +{{y:4f}} {report['unit']}"
        texts = [f"{value:.4g}" for value, _ in series.means(entry)]
        hollow = [entry["state"] != "bracketed"] * len(x)
        marks.append(Mark(entry["arm"], x, y, when, hover, texts, line=1.8, size=8, hollow=hollow))
    over = Axis("octaves off the optimum (1 is a factor of 2)")
    plots = [Plot(marks, [over], [Axis(f"loss above the lowest ({report['unit']})", least=0)], height=380)]
    note = "What it costs to miss the optimum. A flat arm forgives."
    note += " Hollow: untuned, and then octaves are counted from the best value tried."
    options = {LARGEST: "each arm's largest", **_budgets(report)} if len(report["budgets"]) > 1 else _budgets(report)
    choices = [Choice("budget", "Budget (tokens)", options, many=False), _keys(keys)]
    return _chart(report, "sensitivity", "Sensitivity to the tuned value", note, plots, choices)


def costs(report: Report) -> Chart:
    plots = []
    of_arm = {cost["arm"]: cost for cost in report["costs"]}
    arms = [arm for arm in looks_of(report) if arm in of_arm]
    for key, title, factor in (
        ("step_time", "Step time (ms)", 1000.0),
        ("memory_gb", "Peak memory (GB)", 1.0),
        ("flops_per_token", "FLOPs per token", 1.0),
    ):
        values = {arm: factor * of_arm[arm][key] for arm in arms if of_arm[arm][key] is not None}
        bar = partial(Mark, hover="{arm}: {x:si}", bar=True)
        marks = [bar(arm, [value], [row], label=si(value)) for row, (arm, value) in enumerate(values.items())]
        if marks:
            y = rows([label(report, arm) for arm in values])
            plots.append(Plot(marks, [Axis("", least=0)], [y], title, height=90 + 38 * len(values)))
    return _chart(report, "memory-and-time", "Memory and step time", "", plots, (), legend=False)


CHARTS: tuple[Callable[[Report], Chart], ...] = (speedup, difference, end_loss, curves, tuning, sensitivity, costs)
# By file name: the chart, and the choices that the picture shows.
PICTURES: dict[str, tuple[Callable[[Report], Chart], Picture]] = {
    "speedup": (speedup, Picture("Speed-up against budget", {"how": "annealed"}, beside="unit")),
    "difference": (difference, Picture("Difference from the baseline, at the largest budget that both have")),
    "end_loss": (end_loss, Picture("End loss against budget, with the baseline's fit and matched loss")),
    "loss_over_tokens": (curves, Picture("Loss over tokens", {"axis": "tokens"})),
    "loss_over_flops": (curves, Picture("Loss over FLOPs", {"axis": "flops"})),
    "loss_over_seconds": (curves, Picture("Loss over seconds", {"axis": "seconds"})),
    "tuning": (tuning, Picture("Tuning of each arm", beside="key")),
    "sensitivity": (sensitivity, Picture("Sensitivity to the tuned value")),
    "memory_and_step_time": (costs, Picture("Memory and step time")),
}


def write_figures(report: Report, folder: Path) -> dict[str, str]:
    """Writes PICTURES with data as PNG and SVG into `folder`, and removes the others. Returns captions by name."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for name, (make, picture) in PICTURES.items():
        if write_picture(make(report), picture, folder, name):
            captions[name] = picture.caption
        else:
            for kind in ("png", "svg"):
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    return captions
