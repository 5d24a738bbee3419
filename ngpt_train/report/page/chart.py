"""A figure as data. `page.js` draws it in a browser with its choices for the reader; `pictures.py` draws one choice as
PNG and SVG. An arm or a run has the same colour and marker on every figure and in every table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

When = Mapping[str, str | tuple[str, ...]]  # name of a choice -> options; one of them must be chosen
Chosen = Mapping[str, Iterable[str]]  # name of a choice -> the chosen options
SHORT = 6  # letters of a label that has room beside a point
# Chosen by search: under normal sight, deuteranopia, protanopia and tritanopia (Machado et al. 2009) any two are 20 or
# more apart in CIELAB, and each has a contrast of 3:1 on white and on the dark page. The first is the baseline's.
COLOURS = ("#5a6875", "#3c72be", "#e03909", "#10a879", "#d975b3", "#b3924b", "#753edd", "#b43140")
# A marker tells arms apart without colour, and where there are more arms than colours. A symbol has matplotlib's name,
# and a glyph beside the arm's name in a table.
SYMBOLS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "p": "⬟", "h": "⬢"}


@dataclass(frozen=True)
class Style:
    colour: str
    symbol: str
    glyph: str


def styles(arms: Iterable[str], baseline: str) -> dict[str, Style]:
    """The style of each arm or run, the baseline first, the others in their order."""
    in_order = [baseline, *(arm for arm in arms if arm != baseline)]
    symbols = list(SYMBOLS.items())
    return {arm: Style(COLOURS[k % len(COLOURS)], *symbols[k % len(symbols)]) for k, arm in enumerate(in_order)}


@dataclass(frozen=True)
class Choice:
    """A reader's choice: one of the options, or any of them."""

    name: str  # "arm" chooses among the arms of marks, and is the figure's legend
    label: str
    options: Mapping[str, str]  # option -> its label
    many: bool = True
    first: tuple[str, ...] = ()  # chosen at first; (): all of them, or the first where `many` is false

    @property
    def at_first(self) -> tuple[str, ...]:
        return self.first or tuple(self.options)[: None if self.many else 1]


@dataclass(frozen=True)
class Mark:
    """Points, a line, an area or a bar in the colour of an arm, shown while `when` agrees with the reader's choices.
    Sizes are in pixels of the page. hover: the text of a point, with {arm}, {x:F}, {y:F} and {text} to be replaced; F
    is si, or digits as in 4g or 4f."""

    arm: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    when: When = field(default_factory=dict)
    hover: str = ""
    texts: Sequence[str] = ()  # {text} of each point
    line: float = 0.0  # its width; 0: none
    dotted: bool = False
    size: float = 0.0  # of a point's symbol; 0: none
    only_last: bool = False  # no symbol but at the last point
    hollow: Sequence[bool] = ()  # of each point; (): none is
    symbol: str = ""  # other than the arm's, < and > included
    area: bool = False  # the points are the outline of an area
    bar: bool = False  # from 0 to each x, in its row y
    opacity: float = 1.0
    label: str = ""  # text beside the last point, above it if it is long; in a plot of rows, at the right


@dataclass(frozen=True)
class Axis:
    title: str
    when: When = field(default_factory=dict)
    log: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)  # place -> label; {}: the renderer's own ticks
    range: tuple[float, float] | None = None  # None: around the marks
    least: float | None = None  # the range includes this value
    whole: bool = False  # ticks are at whole numbers
    rule: float | None = None  # a dotted line stands at this value
    rows: Sequence[str] = ()  # the axis has rows with these names, row 0 on top


@dataclass(frozen=True)
class Plot:
    """The first x axis and the first y axis that agree with the choices are drawn."""

    marks: list[Mark]
    x: Sequence[Axis]
    y: Sequence[Axis]
    title: str = ""
    height: int = 420  # pixels of the page


@dataclass(frozen=True)
class Chart:
    """One or more plots with the same choices. labels: the name of each arm, with its stamps."""

    name: str  # the anchor
    title: str
    note: str
    plots: list[Plot]
    looks: Mapping[str, Style]
    labels: Mapping[str, str]
    choices: list[Choice] = field(default_factory=list)

    def choice_of_arms(self, label: str) -> Choice:
        """The choice among the arms with a mark."""
        shown = {mark.arm for plot in self.plots for mark in plot.marks}
        return Choice("arm", label, {arm: self.labels[arm] for arm in self.looks if arm in shown})


def rows(names: Sequence[str], title: str = "") -> Axis:
    """A y axis with a row for each name."""
    return Axis(title, rows=names, range=(len(names) - 0.5, -0.9))


def agrees(when: When, chosen: Chosen) -> bool:
    """False if a choice in `when` has none of its options chosen."""
    return all(
        set([options] if isinstance(options, str) else options) & set(chosen[name])
        for name, options in when.items()
        if name in chosen
    )


def as_json(charts: Iterable[Chart]) -> str:
    """The charts as JSON, escaped for the script around it. Equal arrays of numbers are written once, since many curves
    have the same steps; a field with its default is left out."""
    arrays: dict[str, int] = {}

    def content(plot: Plot) -> dict[str, Any]:
        axes = {"x": list(map(_axis, plot.x)), "y": list(map(_axis, plot.y))}
        return {"marks": [_mark(mark, arrays) for mark in plot.marks], **axes, "height": plot.height}

    found = {}
    for chart in charts:
        arms = {arm: [look.colour, look.symbol, chart.labels[arm]] for arm, look in chart.looks.items()}
        found[chart.name] = {"arms": arms, "plots": list(map(content, chart.plots))}
    text = _json(found)
    return f'{{"charts":{text},"arrays":[{",".join(arrays)}]}}'.replace("<", "\\u003c")


def _mark(mark: Mark, arrays: dict[str, int]) -> dict[str, Any]:
    x, y = (arrays.setdefault(_json([_short(v) for v in of]), len(arrays)) for of in (mark.x, mark.y))
    return _without_defaults(mark) | {"x": x, "y": y}


def _axis(axis: Axis) -> dict[str, Any]:
    found = _without_defaults(axis)
    return found | {"ticks": list(axis.ticks.items())} if axis.ticks else found


def _without_defaults(described: Mark | Axis) -> dict[str, Any]:
    found = {}
    for each in fields(described):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if (value := getattr(described, each.name)) != default:
            found[each.name] = value
    return found


def _short(value: float | None) -> float | None:
    """`value` in six digits, more than a screen shows; the JSON beside the page has all digits."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
