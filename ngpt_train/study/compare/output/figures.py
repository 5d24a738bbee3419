"""The report's figures as PNG and SVG: each says the same as the page's figure of its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ngpt_train.report.page.pictures import SETTINGS, write_picture
from ngpt_train.report.page.style import styles
from ngpt_train.study.compare.output import series
from ngpt_train.study.compare.output.wording import UNITS, Report, difference_of, interval, label, percent, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 4.2  # inches
LONGEST = 32  # letters of an arm's name on a figure


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg into `folder`, which it makes, of each figure that the report has data for; returns
    the PNGs."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(SETTINGS):
        for name, draw in FIGURES.items():
            figure = draw(report)
            if figure is not None:
                written.append(write_picture(figure, folder, name))
    return written


def _new(width: float = WIDTH, height: float = HEIGHT, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _look(report: Report, arm: str, tuned: bool = True) -> dict[str, Any]:
    """Colour and marker; hollow where untuned."""
    style = styles(report["arms"], report["baseline"])[arm]
    return {"color": style.colour, "marker": style.marker, "markerfacecolor": style.colour if tuned else "white"}


def _line(report: Report, arm: str) -> dict[str, Any]:
    return {"color": _look(report, arm)["color"]}


def _name(report: Report, arm: str) -> str:
    """Short enough for a legend; the stamps stay."""
    return label(report, arm).replace(arm, f"{arm[:LONGEST]}...", 1) if len(arm) > LONGEST else label(report, arm)


def _legend(report: Report, figure: Figure, arms: Iterable[str]) -> None:
    """Above the figure; the stamps stand beside the names."""
    from matplotlib.lines import Line2D

    shown = set(arms)
    handles = [
        Line2D([], [], lw=1.5, ms=5, label=_name(report, arm), **_look(report, arm, report["arms"][arm]["tuned"]))
        for arm in styles(report["arms"], report["baseline"])
        if arm in shown
    ]
    columns = 4 if max(len(_name(report, arm)) for arm in shown) < 24 else 2
    figure.legend(handles=handles, fontsize=8, ncols=columns, loc="outside upper center")


def _over(axes: Axes, axis: str, title: str, budgets: list[int] | None = None) -> None:
    from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

    axes.set_xlabel(title)
    if budgets:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([float(budget) for budget in budgets]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x)))
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _curves(report: Report, axis: str) -> Figure | None:
    """Validation loss of each run at its arm's best values."""
    drawn = [(curve, series.eval_axis(report, curve, axis)) for curve in report["curves"] if curve["best"]]
    drawn = [(curve, x) for curve, x in drawn if any(x)]
    if not drawn:
        return None
    figure, (axes,) = _new()
    budgets, shown = sorted(report["budgets"]), []
    for curve, x in drawn:
        budget, losses = curve["budget"], curve["eval"]["loss"]
        look = _look(report, curve["arm"], series.state_at(report, curve["arm"], budget))
        paler = 0.4 + 0.6 * (budgets.index(budget) + 1) / len(budgets) if budget in budgets else 1.0
        xs, ys = _floats(x), _floats(losses)
        axes.plot(xs, ys, lw=1.3, ms=5, alpha=paler, markevery=[len(ys) - 1], **look)
        late = [y for t, y in zip(curve["eval"]["tokens"], losses, strict=True) if y is not None and t >= 0.1 * budget]
        shown += late or [y for y in losses if y is not None]
    pad = 0.05 * (max(shown) - min(shown)) or 0.05
    axes.set_ylim(min(shown) - pad, max(shown) + pad)
    axes.set_ylabel(f"validation loss ({report['unit']})")
    _over(axes, axis, series.axis_title(report, axis))
    _legend(report, figure, [curve["arm"] for curve, _ in drawn])
    return figure


def _floats(values: list[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _end_loss(report: Report, axis: str = "tokens") -> Figure | None:
    """Mean and seeds of each arm over its budgets, the baseline's fit, and an arrow to where it has the same loss."""
    figure, (axes,) = _new()
    arms = []
    for arm in report["arms"]:
        losses = series.end_losses(report, arm)
        costs = [series.cost_of(report, arm, budget, axis) for budget in losses]
        at = [cost for cost in costs if cost is not None]
        if not losses or len(at) < len(losses):
            continue
        arms.append(arm)
        fit = series.fit(report, arm)
        if fit:
            axes.plot(*fit, lw=1.5, **_line(report, arm))
        for x, budget, found in zip(at, losses, losses.values(), strict=True):
            look = _look(report, arm, series.state_at(report, arm, budget))
            axes.plot([x] * len(found), found, ls="", ms=2.5, alpha=0.6, **look)
            axes.plot([x], [np.mean(found)], ls="", ms=6, **look)
        if not fit:
            axes.plot(at, [np.mean(found) for found in losses.values()], lw=1, ls=":", **_line(report, arm))
    for arm, start, end, loss in series.arrows(report, axis):
        arrow = {"arrowstyle": "->", "lw": 0.9, **_line(report, arm)}
        axes.annotate("", xy=(end, loss), xytext=(start, loss), arrowprops=arrow)
        axes.plot([end], [loss], alpha=0)  # so that the axis reaches it
    if not arms:
        return None
    axes.set_ylabel(f"end loss ({report['unit']})")
    _over(axes, axis, series.axis_title(report, axis), sorted(report["budgets"]))
    _legend(report, figure, arms)
    return figure


def _difference(report: Report) -> Figure | None:
    """A row for each arm: its end loss less the baseline's, with the interval, also as numbers."""
    found = {arm: difference_of(report, arm) for arm in styles(report["arms"], report["baseline"])}
    rows = [(arm, entry) for arm, entry in found.items() if entry]
    if not rows:
        return None
    figure, (axes,) = _new(height=1.0 + 0.27 * len(rows))
    axes.axvline(0, color="black", lw=0.8, ls=":")
    for row, (arm, entry) in enumerate(rows):
        if entry["low"] is not None and entry["high"] is not None:
            axes.hlines(row, entry["low"], entry["high"], lw=1.5, **_line(report, arm))
        solid = all(series.state_at(report, name, entry["budget"]) for name in (arm, report["baseline"]))
        axes.plot([entry["estimate"]], [row], ls="", ms=4.5, **_look(report, arm, solid))
    axes.set_yticks(range(len(rows)), [_name(report, arm) for arm, _ in rows], fontsize=8)
    numbers = [interval(entry["estimate"], entry["low"], entry["high"]) for _, entry in rows]
    axes.secondary_yaxis("right").set_yticks(range(len(rows)), numbers, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"end loss minus that of {_name(report, report['baseline'])} ({report['unit']}; negative: better)")
    bars = f"bars and brackets: {percent(report['confidence'])} intervals; hollow: the arm or the baseline is untuned"
    figure.supxlabel(bars, fontsize=8)
    return figure


def _speedup(report: Report) -> Figure | None:
    """Between annealed runs, in tokens, FLOPs and seconds."""
    units = [u for u in UNITS if any(series.speedups(report, arm, u, "annealed") for arm in report["arms"])]
    if not units:
        return None
    figure, panels = _new(3.2 * len(units) + 0.6, 3.6, len(units))
    shown: dict[str, None] = {}
    for axes, unit in zip(panels, units, strict=True):
        ends = []
        for arm in report["arms"]:
            entries = series.speedups(report, arm, unit, "annealed")
            ends += [s[end] for s in entries for end in ("estimate", "low", "high") if s[end]]
            if entries:
                shown[arm] = None
                _ratios(axes, report, arm, entries)
        ticks = series.ratio_ticks(ends)
        axes.axhline(1, color="black", lw=0.8, ls=":")
        axes.set_yscale("log")
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_yticks([], minor=True)
        axes.set_ylabel(f"times the {UNITS[unit]} that {report['baseline']} needs")
        _over(axes, "tokens", "budget (tokens of the arm)", sorted(report["budgets"]))
    _legend(report, figure, shown)
    figure.supxlabel(
        f"bands and bars: {percent(report['confidence'])} intervals; hollow: untuned or extrapolated", fontsize=8
    )
    return figure


def _ratios(axes: Axes, report: Report, arm: str, entries: list[Mapping[str, Any]]) -> None:
    line = _line(report, arm)
    closed = [s for s in entries if s["low"] is not None and s["high"] is not None]
    x, low, high = ([s[key] for s in closed] for key in ("budget", "low", "high"))
    axes.fill_between(x, low, high, alpha=0.15, lw=0, **line)
    axes.vlines(x, low, high, lw=1, **line)
    for s in entries:  # an interval with one open end
        for known, far, mark in (("low", 1.12, "^"), ("high", 1 / 1.12, "v")):
            other = "high" if known == "low" else "low"
            if s[known] is not None and s[other] is None:
                tip = s["estimate"] * far
                axes.plot([s["budget"]] * 2, [s[known], tip], lw=1, marker=mark, ms=5, markevery=[1], **line)
    axes.plot([s["budget"] for s in entries], [s["estimate"] for s in entries], lw=1.3, **line)
    for s in entries:
        solid = series.state_at(report, arm, s["budget"]) and not s["extrapolated"]
        axes.plot([s["budget"]], [s["estimate"]], ls="", ms=6, **_look(report, arm, solid))


def _tuning(report: Report) -> Figure | None:
    """A panel for each arm and tuned key, a curve for each budget."""
    panels = [
        (arm, key, entries)
        for arm in styles(report["arms"], report["baseline"])
        for key in dict.fromkeys(entry["key"] for entry in report["tuning"])
        if (entries := [t for t in report["tuning"] if (t["arm"], t["key"]) == (arm, key) and t["points"]])
    ]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, all_axes = _new(3.2 * columns, 2.7 * rows, columns, rows)
    for axes, (arm, key, entries) in zip(all_axes, panels, strict=False):
        axes.set_title(_name(report, arm), fontsize=9)
        axes.set_xlabel(key)
        axes.set_ylabel(f"end loss ({report['unit']})")
        if all(map(series.is_numeric, entries)):
            _logarithmic(axes, sorted({point["value"] for entry in entries for point in entry["points"]}))
        for entry in entries:
            _tuning_curve(axes, report, entry)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    return figure


def _logarithmic(axes: Axes, values: list[float]) -> None:
    axes.set_xscale("log")
    few = values[:: len(values) // 5 + 1]
    axes.set_xticks(few, [f"{value:.2g}" for value in few], minor=False)
    axes.set_xticks([], minor=True)


def _tuning_curve(axes: Axes, report: Report, entry: Mapping[str, Any]) -> None:
    arm, averaged, parabola = entry["arm"], series.means(entry), series.parabola(entry)
    numeric = series.is_numeric(entry)
    if averaged:
        x, y = zip(*averaged, strict=True)
        x = x if numeric else tuple(map(str, x))
        look = _look(report, arm, entry["state"] == "bracketed")
        axes.plot(x, y, lw=0.8, ls=":" if parabola else "-", ms=4, **look)
        axes.annotate(si(entry["budget"]), (x[-1], y[-1]), (4, 0), textcoords="offset points", fontsize=7, va="center")
    if parabola:
        axes.plot(*parabola, lw=1.4, **_line(report, arm))
        if entry["low"] is not None and entry["high"] is not None:
            axes.hlines(min(parabola[1]), entry["low"], entry["high"], lw=5, alpha=0.3, **_line(report, arm))
    failed = [point["value"] for point in entry["points"] if point["failed"]]
    if failed and averaged:
        top = [max(y for _, y in averaged)] * len(failed)
        axes.plot(failed if numeric else list(map(str, failed)), top, ls="", marker="x", ms=6, **_line(report, arm))


def _sensitivity(report: Report) -> Figure | None:
    """At each arm's largest budget."""
    figure, (axes,) = _new(height=3.6)
    arms = []
    for arm in report["arms"]:
        entries = [t for t in report["tuning"] if t["arm"] == arm and series.sensitivity(t)]
        if entries:
            entry = max(entries, key=lambda t: (t["key"] == "optim.lr", t["budget"]))
            look = _look(report, arm, entry["state"] == "bracketed")
            axes.plot(*(series.sensitivity(entry) or ()), lw=1.3, ms=5, **look)
            arms.append(arm)
    if not arms:
        return None
    axes.set_xlabel("octaves off the optimum (1 is a factor of 2); untuned: off the best tried")
    axes.set_ylabel(f"loss above the lowest ({report['unit']})")
    axes.set_ylim(bottom=0)
    _legend(report, figure, arms)
    return figure


def _costs(report: Report) -> Figure | None:
    of_arm = {cost["arm"]: cost for cost in report["costs"]}
    quantities = [("step_time", "step time (ms)", 1000.0), ("memory_gb", "peak memory (GB)", 1.0)]
    quantities = [q for q in quantities if any(cost[q[0]] is not None for cost in of_arm.values())]
    if not quantities:
        return None
    arms = [arm for arm in styles(report["arms"], report["baseline"]) if arm in of_arm]
    figure, panels = _new(WIDTH, 0.9 + 0.32 * len(arms), len(quantities))
    for axes, (key, title, factor) in zip(panels, quantities, strict=True):
        widths = [factor * (of_arm[arm][key] or 0) for arm in arms]
        bars = axes.barh([_name(report, arm) for arm in arms], widths, color=[_look(report, a)["color"] for a in arms])
        shown = [si(factor * of_arm[arm][key]) if of_arm[arm][key] is not None else "not known" for arm in arms]
        axes.bar_label(bars, shown, padding=3, fontsize=8)
        axes.set_xlabel(title)
        axes.margins(x=0.18)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    for axes in panels[1:]:
        axes.set_yticklabels([])
    return figure


FIGURES: dict[str, Callable[[Report], Figure | None]] = {
    "speedup": _speedup,
    "difference": _difference,
    "end_loss": _end_loss,
    "loss_over_tokens": lambda report: _curves(report, "tokens"),
    "loss_over_flops": lambda report: _curves(report, "flops"),
    "loss_over_seconds": lambda report: _curves(report, "seconds"),
    "tuning": _tuning,
    "sensitivity": _sensitivity,
    "memory_and_step_time": _costs,
}
CAPTIONS = {
    "speedup": "Speed-up against budget",
    "difference": "Difference from the baseline, at the largest budget that both have",
    "end_loss": "End loss against budget, with the baseline's fit and matched loss",
    "loss_over_tokens": "Loss over tokens",
    "loss_over_flops": "Loss over FLOPs",
    "loss_over_seconds": "Loss over seconds",
    "tuning": "Tuning of each arm",
    "sensitivity": "Sensitivity to the tuned value",
    "memory_and_step_time": "Memory and step time",
}
