"""The page's figures over budgets: speed-up, difference and end loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ngpt_train.report.page.charts import Chart, Choice, Plot, escaped
from ngpt_train.study.compare.output import series
from ngpt_train.study.compare.output.sheet import Sheet, linear_axis, log_axis
from ngpt_train.study.compare.output.wording import HOW, UNITS, interval, label, percent, ratio, si

BUDGET = "budget (tokens of the arm)"
NO_DIFFERENCE = {"width": 1, "dash": "dot"}  # page.js gives it the colour of the text


def speedup(sheet: Sheet) -> Chart:
    report, traces, shown = sheet.report, [], []
    units, hows = set(), set()
    for arm in sheet.arms:
        for unit in UNITS:
            for how in HOW:
                entries = series.speedups(report, arm, unit, how)
                if entries:
                    traces += _ratios(sheet, arm, {"unit": unit, "how": how}, entries)
                    shown.append(arm)
                    units.add(unit)
                    hows.add(how)
    ends = [value for trace in traces for value in trace["y"] if value]
    ticks = series.ratio_ticks(ends) if ends else [1.0]
    span = [math.log10(min([*ends, 0.9]) * 0.95), math.log10(max([*ends, 1.1]) * 1.05)]
    baseline = escaped(report["baseline"])
    layout = sheet.layout(
        xaxis=log_axis(BUDGET, sheet.budgets),
        yaxis=log_axis(f"{baseline} needs this many times", ticks) | {"range": span},
        shapes=[_line(1)],
    )
    layouts = {
        f"unit={unit}": {"yaxis": {"title": {"text": f"times the {UNITS[unit]} that {baseline} needs"}}}
        for unit in UNITS
    }
    choices = [
        sheet.of_arms(shown),
        sheet.of_axes([unit for unit in UNITS if unit in units], "unit", "Counted in"),
        Choice("how", "Matched", {how: HOW[how] for how in HOW if how in hows}, many=False),
    ]
    note = (
        f"How many times the arm's tokens, FLOPs or seconds {report['baseline']} needs for the loss that the arm ends "
        f"at; bands are {percent(report['confidence'])} intervals. Above 1 the arm is ahead. Hollow: untuned, or "
        f"beyond the budgets of the fit; an arrow: that end of the interval is open. Within one schedule "
        f"the loss is that of the worse of the two, and the ratio flatters the arm whose learning rate decays faster."
    )
    return Chart(
        "speedup", "Speed-up against budget", note, [Plot("Speed-up against budget", traces, layout, layouts)], choices
    )


def _ratios(sheet: Sheet, arm: str, meta: dict[str, str], entries: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The band where both of its ends are known, an arrow where one is open, the estimates on top."""
    x = [s["budget"] for s in entries]
    colour = sheet.styles[arm].colour
    traces = []
    closed = [s for s in entries if s["low"] is not None and s["high"] is not None]
    if len(closed) > 1:
        budgets = [s["budget"] for s in closed]
        outline = [s["low"] for s in closed] + [s["high"] for s in reversed(closed)]
        band: dict[str, Any] = {"fill": "toself", "fillcolor": _faint(colour), "mode": "lines", "line": {"width": 0}}
        traces.append(sheet.trace(arm, meta, budgets + budgets[::-1], outline, **band))
    for s in closed:
        ends: dict[str, Any] = {"mode": "lines", "line": {"width": 1.5}}
        traces.append(sheet.trace(arm, meta, [s["budget"]] * 2, [s["low"], s["high"]], **ends))
    for end, symbol in (("low", "arrow-down"), ("high", "arrow-up")):
        other = "high" if end == "low" else "low"
        open_ended = [s for s in entries if s[end] is None and s[other] is not None]
        for s in open_ended:
            marker = {"symbol": ["circle", symbol], "size": [1, 11], "line": {"width": 0}}
            tip = s["estimate"] * (1.12 if end == "high" else 1 / 1.12)
            more: dict[str, Any] = {"mode": "lines+markers", "line": {"width": 1.5}, "marker": marker}
            traces.append(sheet.trace(arm, meta, [s["budget"]] * 2, [s[other], tip], **more))
    symbols = [
        sheet.symbol(arm, series.state_at(sheet.report, arm, s["budget"]) and not s["extrapolated"]) for s in entries
    ]
    texts = [f"{ratio(s)} times{f'<br>{escaped(note)}' if (note := s['note']) else ''}" for s in entries]
    hover = "%{meta.label}<br>%{x:.3s} tokens: %{customdata}"
    more = {"mode": "lines+markers", "marker": {"symbol": symbols}, "customdata": texts}
    traces.append(sheet.trace(arm, meta, x, [s["estimate"] for s in entries], hover, **more))
    return traces


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def _line(y: float) -> dict[str, Any]:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": NO_DIFFERENCE}


def difference(sheet: Sheet) -> Chart:
    """A row for each arm, beneath its name, which a phone has no room for at the side."""
    report, traces = sheet.report, []
    found = [entry for entry in report["differences"] if entry["estimate"] is not None]
    budgets = sorted({entry["budget"] for entry in found}, reverse=True)
    arms = [arm for arm in sheet.arms if any(entry["arm"] == arm for entry in found)]
    for entry in found:
        arm, budget, row = entry["arm"], entry["budget"], arms.index(entry["arm"])
        meta = {"budget": str(budget)}
        if entry["low"] is not None and entry["high"] is not None:
            ends = {"symbol": "line-ns", "size": 7, "line": {"width": 2, "color": sheet.styles[arm].colour}}
            bar: dict[str, Any] = {"mode": "lines+markers", "line": {"width": 2}, "marker": ends}
            traces.append(sheet.trace(arm, meta, [entry["low"], entry["high"]], [row, row], **bar))
        solid = all(series.state_at(report, name, budget) for name in (arm, report["baseline"]))
        shown = escaped(interval(entry["estimate"], entry["low"], entry["high"]))
        hover = f"%{{meta.label}}, {si(budget)} tokens<br>{shown} {sheet.unit}"
        point: dict[str, Any] = {"mode": "markers", "marker": {"symbol": sheet.symbol(arm, solid)}}
        traces.append(sheet.trace(arm, meta, [entry["estimate"]], [row], hover, **point))
    left = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "yshift": 4, "showarrow": False}
    names = [left | {"y": row, "text": escaped(label(report, arm))} for row, arm in enumerate(arms)]
    layout = sheet.layout(
        xaxis=linear_axis(f"end loss minus that of {escaped(report['baseline'])} ({sheet.unit})", nticks=6),
        yaxis={"showticklabels": False, "ticks": "", "showgrid": False, "range": [len(arms) - 0.5, -0.9]},
        shapes=[{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "line": NO_DIFFERENCE}],
        annotations=names,
        margin={"l": 12, "r": 18, "t": 30, "b": 48},
    )
    choice = Choice("budget", "Budget (tokens)", {str(budget): si(budget) for budget in budgets}, many=False)
    baseline = label(report, report["baseline"])
    note = (
        f"Left of the line an arm's loss is lower than that of {baseline}. Bars are {percent(report['confidence'])} "
        f"intervals. Hollow: the arm or {report['baseline']} is untuned at that budget."
    )
    title = "Difference from the baseline"
    return Chart("difference", title, note, [Plot(title, traces, layout, height=120 + 38 * len(arms))], [choice])


def end_loss(sheet: Sheet) -> Chart:
    report, traces = sheet.report, []
    axes = series.axes_of(report)
    ends: dict[str, list[float]] = {axis: [] for axis in axes}
    for arm in sheet.arms:
        losses = series.end_losses(report, arm)
        for axis in axes:
            at = {budget: series.cost_of(report, arm, budget, axis) for budget in losses}
            if not losses or None in at.values():
                continue
            ends[axis] += [cost for cost in at.values() if cost]
            seeds = [(at[budget], loss) for budget, found in losses.items() for loss in found]
            hover = f"%{{meta.label}}<br>%{{x:.3s}} {UNITS[axis]}: %{{y:.4f}} {sheet.unit}"
            meta = {"axis": axis}
            small: dict[str, Any] = {"mode": "markers", "opacity": 0.45, "marker": {"size": 5}}
            x, y = zip(*seeds, strict=True)
            traces.append(sheet.trace(arm, meta, x, y, hover + ", one seed", **small))
            symbols = [sheet.symbol(arm, series.state_at(report, arm, budget)) for budget in losses]
            means = [float(np.mean(found)) for found in losses.values()]
            fit = series.fit(report, arm)
            lines: dict[str, Any] = {
                "mode": "markers" if fit else "lines+markers",
                "line": {"width": 1.5, "dash": "dot"},
            }
            more = lines | {"marker": {"symbol": symbols}}
            traces.append(sheet.trace(arm, meta, at.values(), means, hover + ", mean over seeds", **more))
            if fit:
                rate = series.cost_of(report, arm, 1.0, axis) or 1.0
                traces.append(sheet.trace(arm, meta, [rate * x for x in fit[0]], fit[1], mode="lines"))
    for axis in axes:
        for arm, start, end, loss in series.arrows(report, axis):
            ends[axis].append(end)
            tip = {"size": [0, 11], "symbol": "arrow", "angleref": "previous", "line": {"width": 0}}
            hover = f"%{{meta.label}}: {escaped(report['baseline'])} needs {end / start:.3g} times the {UNITS[axis]}"
            more = {"mode": "lines+markers", "line": {"width": 1}, "marker": tip, "opacity": 0.8}
            traces.append(sheet.trace(arm, {"axis": axis, "part": "arrows"}, [start, end], [loss, loss], hover, **more))
    layout = sheet.layout(xaxis=log_axis(""), yaxis=linear_axis(f"end loss ({sheet.unit})"))
    layouts = {f"axis={axis}": {"xaxis": _budget_axis(sheet, axis, ends[axis])} for axis in axes}
    parts = Choice("part", "Show", {"arrows": "matched loss"})
    choices = [sheet.of_arms(trace["meta"]["arm"] for trace in traces), sheet.of_axes(axes)]
    if any(trace["meta"].get("part") for trace in traces):
        choices.append(parts)
    note = (
        f"Each run is annealed to its end. Large: mean over seeds; small: one seed; hollow: untuned. Solid: the "
        f"monotone fit through {report['baseline']}'s end losses. An arrow leads from an arm's end to where "
        f"{report['baseline']} has the same loss."
    )
    return Chart(
        "end-loss", "End loss against budget", note, [Plot("End loss against budget", traces, layout, layouts)], choices
    )


def _budget_axis(sheet: Sheet, axis: str, ends: list[float]) -> dict[str, Any]:
    """Wide enough for all points and arrows."""
    found = log_axis(series.axis_title(sheet.report, axis), sheet.budgets if axis == "tokens" else ())
    if ends:
        found["range"] = [math.log10(min(ends)) - 0.04, math.log10(max(ends)) + 0.04]
    return found
