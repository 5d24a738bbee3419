"""The page's figures of tuning: each arm's curves, and what it costs to miss the optimum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ngpt_train.report.page.charts import Chart, Choice, Plot, escaped
from ngpt_train.study.compare.output import series
from ngpt_train.study.compare.output.sheet import Sheet, linear_axis, log_axis
from ngpt_train.study.compare.output.wording import label, si


def tuning(sheet: Sheet) -> Chart:
    report, plots = sheet.report, []
    keys = list(dict.fromkeys(entry["key"] for entry in report["tuning"]))
    for arm in sheet.arms:
        traces, layouts = [], {}
        for key in keys:
            entries = [x for x in report["tuning"] if (x["arm"], x["key"]) == (arm, key) and x["points"]]
            traces += [trace for entry in entries for trace in _tuning_curve(sheet, entry)]
            if all(map(series.is_numeric, entries)):
                values = sorted({point["value"] for entry in entries for point in entry["points"]})
                axis = log_axis(escaped(key), values[:: len(values) // 8 + 1])
                axis["range"] = [math.log10(values[0]) - 0.1, math.log10(values[-1]) + 0.1] if values else None
                axis["ticktext"] = [f"{value:.2g}" for value in axis.get("tickvals", [])]
            else:
                axis = linear_axis(escaped(key), type="category")
            layouts[f"key={key}"] = {"xaxis": axis}
        if traces:
            axes = {"xaxis": linear_axis(""), "yaxis": linear_axis(f"end loss ({sheet.unit})", tickformat=".2f")}
            layout = sheet.layout(**axes, margin={"l": 56, "r": 54, "t": 30, "b": 48})
            said = f"End loss of {label(report, arm)} against the tuned value"
            plots.append(Plot(said, traces, layout, layouts, arm, height=320))
    choices = [sheet.of_budgets(), _keys(keys)]
    note = (
        "End loss against the value tried, a curve for each budget (paler: smaller), with the parabola in its log; "
        "the bar at its lowest point is the interval of the optimum. Hollow: not bracketed, so untuned. A cross above "
        "the curve: the point failed."
    )
    return Chart("tuning-curves", "Tuning of each arm", note, plots, choices)


def _keys(keys: list[str]) -> Choice:
    return Choice("key", "Tuned key", {key: key for key in keys}, many=False)


def _tuning_curve(sheet: Sheet, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    arm, budget = entry["arm"], entry["budget"]
    meta = {"budget": str(budget), "key": entry["key"]}
    averaged = series.means(entry)
    strong: dict[str, Any] = {"opacity": sheet.strength(budget)}
    traces = []
    if averaged:
        x, y = zip(*averaged, strict=True)
        parabola = series.parabola(entry)
        symbol = sheet.symbol(arm, entry["state"] == "bracketed")
        line = {"width": 1, "dash": "dot"} if parabola else {"width": 1.5}
        names = [""] * (len(x) - 1) + [f" {si(budget)}"]
        hover = f"%{{meta.label}}, {si(budget)} tokens<br>%{{x:.4g}}: %{{y:.4f}} {sheet.unit}"
        more = {"mode": "lines+markers+text", "line": line, "marker": {"symbol": symbol, "size": 8}, **strong}
        traces.append(
            sheet.trace(arm, meta, x, y, hover, text=names, textposition="middle right", cliponaxis=False, **more)
        )
        if parabola:
            traces.append(sheet.trace(arm, meta, *parabola, mode="lines", **strong))
            if entry["low"] is not None and entry["high"] is not None:
                lowest = min(parabola[1])
                hover = f"optimum {entry['optimum']:.3g} ({entry['low']:.3g} to {entry['high']:.3g})"
                bar = {"mode": "lines", "line": {"width": 6}, "opacity": 0.35}
                traces.append(sheet.trace(arm, meta, [entry["low"], entry["high"]], [lowest] * 2, hover, **bar))
    failed = [point["value"] for point in entry["points"] if point["failed"]]
    if failed:
        top = max([y for _, y in averaged], default=0.0)
        cross = {
            "mode": "markers",
            "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": sheet.styles[arm].colour}},
        }
        traces.append(sheet.trace(arm, meta, failed, [top] * len(failed), "%{x:.4g}: failed", **cross, **strong))
    return traces


def sensitivity(sheet: Sheet) -> Chart:
    report, traces = sheet.report, []
    keys = list(dict.fromkeys(entry["key"] for entry in report["tuning"] if series.is_numeric(entry)))
    for entry in report["tuning"]:
        found = series.sensitivity(entry)
        if not found:
            continue
        arm, meta = entry["arm"], {"budget": str(entry["budget"]), "key": entry["key"]}
        values = [value for value, _ in series.means(entry)]
        marker = {"symbol": sheet.symbol(arm, entry["state"] == "bracketed"), "size": 8}
        hover = f"%{{meta.label}}, {si(entry['budget'])} tokens<br>%{{customdata:.4g}}: +%{{y:.4f}} {sheet.unit}"
        more = {"mode": "lines+markers", "line": {"width": 1.8}, "marker": marker, "customdata": values}
        traces.append(sheet.trace(arm, meta, *found, hover, **more))
    layout = sheet.layout(
        xaxis=linear_axis("octaves off the optimum (1 is a factor of 2)", zeroline=True, dtick=1),
        yaxis=linear_axis(f"loss above the lowest ({sheet.unit})", rangemode="tozero"),
    )
    choices = [sheet.of_arms(trace["meta"]["arm"] for trace in traces), sheet.of_budgets(many=False), _keys(keys)]
    note = (
        "What it costs to miss the optimum. A flat arm forgives. Hollow: untuned, and then octaves are counted from "
        "the best value tried."
    )
    return Chart(
        "sensitivity",
        "Sensitivity to the tuned value",
        note,
        [Plot("Loss against octaves off the optimum", traces, layout, height=380)],
        choices,
    )
