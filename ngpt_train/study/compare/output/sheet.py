"""The traces, axes and switches of a comparison's page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ngpt_train.report.page.charts import Choice, escaped, layout
from ngpt_train.report.page.style import Style, styles
from ngpt_train.study.compare.output.wording import UNITS, Report, label, si


class Sheet:
    """Traces, layouts and choices for one report. plotly checks every trace and layout as it is made."""

    def __init__(self, report: Report) -> None:
        import plotly.graph_objects as graph

        self.report, self.graph = report, graph
        self.styles: dict[str, Style] = styles(report["arms"], report["baseline"])
        self.arms = list(self.styles)
        self.budgets = sorted(report["budgets"])
        self.unit = escaped(report["unit"])

    def of_arms(self, names: Iterable[str]) -> Choice:
        shown = set(names)
        options = {arm: label(self.report, arm) for arm in self.arms if arm in shown}
        marks = {arm: (self.styles[arm].colour, self.styles[arm].glyph) for arm in options}
        return Choice("arm", "Arms", options, marks=marks)

    def of_budgets(self, many: bool = True) -> Choice:
        options = {str(budget): si(budget) for budget in reversed(self.budgets)}
        return Choice("budget", "Budget (tokens)", options, many)

    def of_axes(self, axes: Iterable[str], name: str = "axis", words: str = "Over") -> Choice:
        return Choice(name, words, {axis: UNITS[axis] for axis in axes}, many=False)

    def strength(self, budget: int) -> float:
        """The larger the budget, the less transparent its curve."""
        return 0.45 + 0.55 * (self.budgets.index(budget) + 1) / len(self.budgets) if budget in self.budgets else 1.0

    def trace(self, arm: str, meta: Mapping[str, Any], x: Any, y: Any, hover: str = "", **more: Any) -> dict[str, Any]:
        """Points or a line in the arm's colour. `hover` may read %{x}, %{y}, %{customdata} and %{meta.label}."""
        style = self.styles[arm]
        line = {"color": style.colour, "width": 2} | more.pop("line", {})
        marker = {"color": style.colour, "size": 9, "symbol": style.symbol} | more.pop("marker", {})
        made = self.graph.Scatter(
            x=list(x),
            y=list(y),
            meta={"arm": arm, "label": escaped(label(self.report, arm)), **meta},
            line=line,
            marker=marker,
            hovertemplate=hover + "<extra></extra>" if hover else None,
            hoverinfo=None if hover else "skip",
            **more,
        )
        return dict(made.to_plotly_json())

    def layout(self, **parts: Any) -> dict[str, Any]:
        return layout(**parts)

    def symbol(self, arm: str, tuned: bool) -> str:
        """Hollow where the arm is untuned."""
        return self.styles[arm].symbol + ("" if tuned else "-open")


def log_axis(title: str, ticks: Iterable[float | None] = ()) -> dict[str, Any]:
    """A logarithmic axis, with a tick at each of `ticks` where there are any."""
    found: dict[str, Any] = {"title": {"text": title}, "type": "log", "automargin": True}
    at = sorted({float(tick) for tick in ticks if tick})
    if not at:
        return found | {"exponentformat": "SI", "dtick": "D2"}
    margin = max(0.09 * math.log10(at[-1] / at[0]), 0.06)
    ends = [math.log10(at[0]) - margin, math.log10(at[-1]) + margin]
    return found | {"tickmode": "array", "tickvals": at, "ticktext": [si(x) for x in at], "range": ends}


def linear_axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **more}
