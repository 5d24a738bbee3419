"""The figures as PNG and SVG, a panel beside the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ngpt_train.analysis.measures.of_run import Curve
from ngpt_train.analysis.paper_figures import FIGURES, Measured, Panel
from ngpt_train.report.page.pictures import SETTINGS, write_picture
from ngpt_train.report.page.style import Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.8, 2.9  # inches of a panel
COLUMNS = 3
MOST_POINTS = 500  # of a curve in a picture and on the page; analysis.json has all
LONGEST = 40  # letters of a run's name in a legend
FAINT = 4  # from so many curves of a run on in a panel, such as those of heads, they are fainter


def write_pictures(measured: Measured, runs: Sequence[str], folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg of each figure into `folder`, which it makes; returns the PNGs."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    looks = styles(runs, runs[0])
    with matplotlib.rc_context(SETTINGS):
        return [write_picture(_drawn(name, curves, looks), folder, name) for name, curves in measured.curves.items()]


def panels_of(name: str, curves: Mapping[str, list[Curve]]) -> dict[str, Panel]:
    """The panels of a figure that have a curve, in their order."""
    filled = {curve.panel for found in curves.values() for curve in found}
    return {panel: of for panel, of in FIGURES[name].panels.items() if panel in filled}


def thinned(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS of the points, evenly among them, the first and the last included."""
    if len(curve.x) <= MOST_POINTS or curve.edges is not None:
        return curve.x, curve.y
    kept = np.unique(np.linspace(0, len(curve.x) - 1, MOST_POINTS).round().astype(int))
    return curve.x[kept], curve.y[kept]


def _drawn(name: str, curves: Mapping[str, list[Curve]], looks: Mapping[str, Style]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    panels = panels_of(name, curves)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + 0.5), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, of) in zip(grid, panels.items(), strict=False):
        axes.set_title(of.title, fontsize=9)
        axes.set_xlabel(of.x)
        axes.set_ylabel(of.y)
        for run, found in curves.items():
            here = [curve for curve in found if curve.panel == panel]
            for curve in here:
                _draw(axes, curve, looks[run], faint=len(here) > FAINT)
        if of.log and any((curve.y > 0).any() for found in curves.values() for curve in found if curve.panel == panel):
            _logarithmic(axes)
        if of.x in ("layer", "batch", "step"):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _name_curves(axes, panel, curves, looks)
    handles = [
        Line2D([], [], color=looks[run].colour, marker=looks[run].marker, ms=5, label=run[:LONGEST]) for run in curves
    ]
    figure.legend(handles=handles, fontsize=8, ncols=min(4, len(handles)), loc="outside upper center")
    return figure


def _draw(axes: Axes, curve: Curve, look: Style, faint: bool) -> None:
    x, y = thinned(curve)
    shapes: dict[str, dict[str, Any]] = {
        "line": {"ls": "-", "lw": 1.4},
        "dotted": {"ls": ":", "lw": 1.2},
        "points": {"ls": "", "marker": look.marker, "ms": 4 if len(x) <= 40 else 2.5},
    }
    shape = shapes[curve.kind]
    if curve.kind != "points" and len(x) <= 40:
        shape |= {"marker": look.marker, "ms": 3.5}
    axes.plot(x, y, color=look.colour, alpha=0.45 if faint or curve.kind == "points" else 1.0, **shape)


def _logarithmic(axes: Axes) -> None:
    """Ticks as plain numbers: powers would be formulas, which SETTINGS leave as text."""
    from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if high / low < 100:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 8 else AutoLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _name_curves(axes: Axes, panel: str, curves: Mapping[str, list[Curve]], looks: Mapping[str, Style]) -> None:
    """Their names at their ends, where a run has a few of them in a panel."""
    for run, found in curves.items():
        here = [curve for curve in found if curve.panel == panel and curve.kind != "points" and len(curve.x)]
        if 1 < len(here) <= FAINT + 1 and len(curves) <= 2:
            for curve in here:
                end = (curve.x[-1], curve.y[-1])
                axes.annotate(curve.name, end, fontsize=6, color=looks[run].colour, ha="right", va="bottom")
