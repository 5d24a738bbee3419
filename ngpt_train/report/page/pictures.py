"""Draws one choice of a chart as PNG and SVG, with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ngpt_train.report.page.chart import SHORT, Axis, Chart, Chosen, Mark, Plot, agrees
from ngpt_train.report.rounded import si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
SETTINGS: Any = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "ngpt-train",  # so that equal reports give equal files
}
COLUMNS = 3
LONGEST = 56  # letters of a name
LINE, SYMBOL = 0.75, 0.62  # points for a pixel of the page


@dataclass(frozen=True)
class Picture:
    """A chart as a picture. chosen: other options than at first. beside: the choice with a panel for each option."""

    caption: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    beside: str = ""


def write_picture(chart: Chart, shown: Picture, folder: Path, name: str) -> Path | None:
    """Writes NAME.png and NAME.svg into `folder`; returns the path of the PNG, or None for a chart without marks."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure = _drawn(chart, shown)
        if figure is None:
            return None
        figure.savefig(folder / f"{name}.png", dpi=DPI)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return folder / f"{name}.png"


def _drawn(chart: Chart, shown: Picture) -> Figure | None:
    from matplotlib.figure import Figure

    chosen: dict[str, Sequence[str]] = {choice.name: choice.at_first for choice in chart.choices}
    chosen |= {name: (option,) for name, option in shown.chosen.items() if name in chosen}
    choices = [chosen]
    if shown.beside:
        choices = [chosen | {shown.beside: (o,)} for c in chart.choices if c.name == shown.beside for o in c.options]
    panels = [(plot, of, found) for plot in chart.plots for of in choices if (found := _visible(plot, of))]
    if not panels:
        return None
    columns = min(COLUMNS, len(panels))
    n_rows = math.ceil(len(panels) / columns)
    lines = max(len(plot.y[0].rows) for plot, *_ in panels)
    width = 7.0 if len(panels) == 1 else 3.3 * columns + 0.4 * (lines > 0)
    height = 0.9 + 0.28 * lines if lines else 4.2 if len(panels) == 1 else 3.0
    figure = Figure(figsize=(width, height * n_rows), layout="constrained")
    grid = list(figure.subplots(n_rows, columns, squeeze=False).flat)
    for axes, (plot, of, marks) in zip(grid, panels, strict=False):
        x, y = (next(axis for axis in found if agrees(axis.when, of)) for found in (plot.x, plot.y))
        axes.set_title(_short(plot.title) if len(chart.plots) > 1 else "", fontsize=9)
        for mark in marks:
            _draw(axes, mark, chart)
            if mark.label and not y.rows:
                _name(axes, mark)
        _shape(axes, "x", x)
        _shape(axes, "y", y)
        if y.rows:
            _name_rows(axes, y, marks)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if any(choice.name == "arm" for choice in chart.choices):
        _legend(figure, chart, {mark.arm for _, _, marks in panels for mark in marks})
    return figure


def _visible(plot: Plot, chosen: Chosen) -> list[Mark]:
    return [mark for mark in plot.marks if agrees({"arm": mark.arm, **mark.when}, chosen)]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}...{name[-LONGEST // 2 :]}"


def _draw(axes: Axes, mark: Mark, chart: Chart) -> None:
    look = chart.looks[mark.arm]
    x, y = (np.array([math.nan if v is None else v for v in of], dtype=np.float64) for of in (mark.x, mark.y))
    if mark.area:
        axes.fill(x, y, color=look.colour, alpha=mark.opacity, lw=0)
    elif mark.bar:
        axes.barh(y, x, height=0.6, color=look.colour)
    if mark.line:
        how = ":" if mark.dotted else "-"
        axes.plot(x, y, ls=how, lw=LINE * mark.line, color=look.colour, alpha=mark.opacity)
    hollow = np.array(mark.hollow or [False] * len(x))
    at = np.arange(len(x)) == (len(x) - 1 if mark.only_last else np.arange(len(x)))
    for these, inside in ((at & ~hollow, look.colour), (at & hollow, "white")):
        if mark.size and these.any():
            points: dict[str, Any] = {"marker": mark.symbol or look.symbol, "ms": SYMBOL * mark.size}
            points |= {"color": look.colour, "markerfacecolor": inside, "alpha": mark.opacity}
            axes.plot(x[these], y[these], ls="", **points)


def _name(axes: Axes, mark: Mark) -> None:
    end: Any = (mark.x[-1], mark.y[-1])
    beside: Any = {"xytext": (4, 0), "va": "center"}
    above: Any = {"xytext": (0, 2), "ha": "right", "va": "bottom"}
    more = beside if len(mark.label) <= SHORT else above
    axes.annotate(mark.label, end, textcoords="offset points", fontsize=7, **more)


def _shape(axes: Axes, which: str, axis: Axis) -> None:
    """The scale, ticks, range and title of an axis."""
    from matplotlib import ticker

    drawn: Any = axes.xaxis if which == "x" else axes.yaxis
    drawn.set_label_text(axis.title)
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
        low, high = drawn.get_view_interval()
        # Powers of ten would be formulas, which SETTINGS leave as text.
        few = ticker.LogLocator(subs=(1, 2, 5)) if high / low > 4 else ticker.AutoLocator()
        drawn.set_major_locator(ticker.LogLocator() if high / low > 1000 else few)
        drawn.set_minor_formatter(ticker.NullFormatter())
    if not axis.rows:
        drawn.set_major_formatter(ticker.FuncFormatter(lambda value, _: si(value, 4)))
    if axis.ticks:
        drawn.set_major_locator(ticker.FixedLocator(list(axis.ticks)))
        drawn.set_minor_locator(ticker.NullLocator())
        drawn.set_major_formatter(ticker.FuncFormatter(lambda value, _: axis.ticks.get(value, "")))
    if axis.whole:
        drawn.set_major_locator(ticker.MaxNLocator(integer=True))
    if axis.rule is not None:
        (axes.axvline if which == "x" else axes.axhline)(axis.rule, color="black", lw=0.8, ls=":")
    if axis.least is not None:
        axes.update_datalim([(axis.least, axis.least)], updatex=which == "x", updatey=which == "y")
        axes.autoscale_view()
    if axis.range is not None:
        axes.set(**{f"{which}lim": axis.range})


def _name_rows(axes: Axes, axis: Axis, marks: Sequence[Mark]) -> None:
    """The names of the rows at the left, the labels of their marks at the right."""
    axes.set_ylim(len(axis.rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    first = axes.get_subplotspec().is_first_col()  # type: ignore[union-attr]
    axes.set_yticks(range(len(axis.rows)), [_short(row) if first else "" for row in axis.rows], fontsize=8)
    labels = {float(mark.y[0] or 0): mark.label for mark in marks if mark.label and mark.y}
    axes.secondary_yaxis("right").set_yticks(list(labels), list(labels.values()), fontsize=8)


def _legend(figure: Figure, chart: Chart, arms: set[str]) -> None:
    """Above the figure; the stamps stand beside the names."""
    from matplotlib.lines import Line2D

    names = {arm: _short(chart.labels[arm]) for arm in chart.looks if arm in arms}
    looks = [(name, chart.looks[arm]) for arm, name in names.items()]
    handles = [Line2D([], [], lw=1.5, ms=5, label=n, color=look.colour, marker=look.symbol) for n, look in looks]
    columns = 4 if max(map(len, names.values())) < 24 else 2
    figure.legend(handles=handles, fontsize=8, ncols=columns, loc="outside upper center")
