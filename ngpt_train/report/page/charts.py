"""What a page's figures are made of. What a reader switches is written beside each trace: `meta` says of which arm or
run, budget and seed it is, and page.js shows the traces whose meta agrees with what is chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """What a reader chooses: one of the options, or any of them."""

    name: str  # the key in the meta of the traces
    label: str
    options: dict[str, str]  # value -> what is said
    many: bool = True
    first: tuple[str, ...] = ()  # those chosen at first; none: all of them, or the first where it is one
    marks: dict[str, tuple[str, str]] = field(default_factory=dict)  # value -> (colour, glyph)


@dataclass(frozen=True)
class Plot:
    said: str  # its accessible name
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    layouts: dict[str, dict[str, Any]] = field(default_factory=dict)  # "axis=flops" -> what then changes
    arm: str | None = None  # whose it is alone; then its name is the title
    height: int = 420


@dataclass(frozen=True)
class Chart:
    """One or more plots that share what is chosen."""

    name: str  # the anchor
    title: str
    note: str
    plots: list[Plot]
    choices: list[Choice] = field(default_factory=list)


def escaped(text: Any) -> str:
    """plotly reads a few HTML tags and entities in its texts."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def layout(**parts: Any) -> dict[str, Any]:
    """A layout that plotly has checked."""
    import plotly.graph_objects as graph

    made: dict[str, Any] = graph.Layout(showlegend=False, hovermode="closest", **parts).to_plotly_json()
    made.pop("template", None)
    return made


def data(charts: Iterable[Chart]) -> str:
    """The charts as JSON that cannot end the script it stands in."""
    found = {
        chart.name: {
            "plots": [
                {"traces": plot.traces, "layout": plot.layout, "layouts": plot.layouts, "height": plot.height}
                for plot in chart.plots
            ]
        }
        for chart in charts
    }
    return json.dumps(_short(found), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: Any) -> Any:
    """Seven digits of every number are more than a screen shows; the JSON beside the page has all."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _short(x) for key, x in value.items()}
    return [_short(x) for x in value] if isinstance(value, (list, tuple)) else value
