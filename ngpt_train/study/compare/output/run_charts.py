"""The page's figures of runs: their curves, what they cost."""

from __future__ import annotations

from typing import Any

from ngpt_train.report.page.charts import Chart, Choice, Plot, escaped
from ngpt_train.study.compare.output import series
from ngpt_train.study.compare.output.sheet import Sheet, linear_axis
from ngpt_train.study.compare.output.wording import label, si


def curves(sheet: Sheet) -> Chart:
    report, traces = sheet.report, []
    axes = series.axes_of(report)
    seeds = sorted({curve["seed"] for curve in report["curves"]})
    tops, lows = [], []
    for curve in report["curves"]:
        arm, budget, evals = curve["arm"], curve["budget"], curve["eval"]
        meta = {"budget": str(budget), "seed": str(curve["seed"]), "rate": "best" if curve["best"] else "other"}
        head = f"%{{meta.label}}, {si(budget)} tokens, seed {curve['seed']}<br>"
        x = {axis: at for axis in axes if any(at := series.eval_axis(report, curve, axis))}
        values = escaped(", ".join(f"{key}={value}" for key, value in curve["values"].items()))
        hover = f"{head}{values}<br>validation %{{y:.4f}} {sheet.unit} at %{{x:.3s}}"
        last = {
            "size": [0] * (len(evals["loss"]) - 1) + [8],
            "symbol": sheet.symbol(arm, series.state_at(report, arm, budget)),
        }
        more = {"mode": "lines+markers", "line": {"width": 1.8}, "marker": last, "opacity": sheet.strength(budget)}
        of_evals = meta | {"data": "validation", "x": x}
        traces.append(sheet.trace(arm, of_evals, evals["tokens"], evals["loss"], hover, **more))
        if curve["train"]["tokens"] and report["metric"] == "loss":
            x = {axis: series.train_axis(report, curve, axis) for axis in axes}
            hover = f"{head}training %{{y:.4f}} at %{{x:.3s}}"
            thin = {"mode": "lines", "line": {"width": 0.8}, "opacity": 0.5}
            of_train = meta | {"data": "training", "x": x}
            traces.append(sheet.trace(arm, of_train, curve["train"]["tokens"], curve["train"]["loss"], hover, **thin))
        known = [(t, loss) for t, loss in zip(evals["tokens"], evals["loss"], strict=True) if loss is not None]
        lows += [loss for _, loss in known]
        tops += [loss for t, loss in known if t >= 0.1 * budget]
    layout = sheet.layout(xaxis=linear_axis(""), yaxis=linear_axis(f"loss ({sheet.unit})", tickformat=".2f"))
    if lows and tops:
        pad = 0.05 * (max(tops) - min(lows))
        layout["yaxis"]["range"] = [min(lows) - pad, max(tops) + pad]
    layouts: dict[str, dict[str, Any]] = {
        f"axis={axis}": {"xaxis": {"title": {"text": series.axis_title(report, axis)}}} for axis in axes
    }
    layouts |= {
        "scale=log": {"xaxis": {"type": "log", "exponentformat": "SI", "dtick": "D2"}},
        "scale=linear": {"xaxis": {"type": "linear", "exponentformat": "SI", "rangemode": "tozero"}},
    }
    choices = [
        sheet.of_arms(curve["arm"] for curve in report["curves"]),
        sheet.of_axes(axes),
        sheet.of_budgets(),
        Choice("seed", "Seed", {str(seed): str(seed) for seed in seeds}),
        Choice("data", "Loss", {"validation": "validation", "training": "training"}, first=("validation",)),
        Choice("scale", "Axis", {"linear": "linear", "log": "logarithmic"}, many=False),
    ]
    if any(not curve["best"] for curve in report["curves"]):
        rates = {"best": "best tried", "other": "others tried"}
        choices.insert(4, Choice("rate", "Tuned values", rates, first=("best",)))
    note = "One curve a run, with a marker at its end. Paler: a smaller budget. Hollow marker: untuned at that budget."
    return Chart(
        "curves",
        "Loss curves",
        note,
        [Plot("Loss over tokens, FLOPs or seconds", traces, layout, layouts, height=480)],
        choices,
    )


def costs(sheet: Sheet) -> Chart:
    report, plots = sheet.report, []
    of_arm = {cost["arm"]: cost for cost in report["costs"]}
    arms = [arm for arm in sheet.arms if arm in of_arm]
    for key, title, factor in (
        ("step_time", "Step time (ms)", 1000.0),
        ("memory_gb", "Peak memory (GB)", 1.0),
        ("flops_per_token", "FLOPs per token", 1.0),
    ):
        known = [arm for arm in arms if of_arm[arm][key] is not None]
        if not known:
            continue
        bar = sheet.graph.Bar(
            y=[escaped(label(report, arm)) for arm in known],
            x=[factor * of_arm[arm][key] for arm in known],
            orientation="h",
            marker={"color": [sheet.styles[arm].colour for arm in known]},
            meta={},
            hovertemplate="%{y}: %{x:.4s}<extra></extra>",
            text=[si(factor * of_arm[arm][key]) for arm in known],
            textposition="auto",
        ).to_plotly_json()
        layout = sheet.layout(
            xaxis=linear_axis(title, exponentformat="SI", nticks=4), yaxis={"automargin": True, "autorange": "reversed"}
        )
        plots.append(Plot(title, [dict(bar)], layout, height=110 + 34 * len(known)))
    return Chart("memory-and-time", "Memory and step time", "", plots)
