"""page.html: all figures on one page, which opens without a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ngpt_train.analysis.measures.of_run import Curve
from ngpt_train.analysis.output.figure_files import FAINT, panels_of, thinned
from ngpt_train.analysis.paper_figures import FIGURES, Measured, Panel
from ngpt_train.core.files import write_atomically
from ngpt_train.report.page.charts import Chart, Choice, Plot, escaped, layout
from ngpt_train.report.page.html import THEME, figure_of, page, section
from ngpt_train.report.page.style import Style, styles
from ngpt_train.report.page.table import table

TITLE = "Measurements of the papers"
DASHES = {"line": "solid", "dotted": "dot"}


def write_page(measured: Measured, content: Mapping[str, Any], path: Path) -> None:
    """content: of analysis.json."""
    write_atomically(path, html(measured, content).encode())


def html(measured: Measured, content: Mapping[str, Any]) -> str:
    names = [str(run["name"]) for run in content["runs"]]
    looks = styles(names, names[0])
    charts = [_chart(name, curves, looks) for name, curves in measured.curves.items()]
    links = [("runs", "Runs"), *((chart.name, chart.name.replace("_", " ")) for chart in charts)]
    links += [("skipped", "What is not shown"), ("again", "How to regenerate")]
    nav = "".join(f'<a href="#{anchor}">{escape(title)}</a> ' for anchor, title in links)
    many = "s" * (len(names) != 1)
    body = [
        f"<header><h1>{TITLE}</h1>\n<p class='facts'>{len(names)} run{many}, {len(charts)} figures. "
        f"analysis.json and analysis.parquet have every number.</p>\n{THEME}\n</header>",
        section("runs", "Runs", table(content["runs"])),
        f'<nav aria-label="Sections">{nav}</nav>',
        '<noscript><p class="box warn">The figures need JavaScript. The folder <code>figures</code> has them as '
        "pictures.</p></noscript>",
    ]
    for chart in charts:
        definition = content["figures"][chart.name]["definition"]
        note = f'<p class="note">{escape(definition)}</p>'
        body.append(section(chart.name, chart.title, note + figure_of(chart, lambda plot: escape(plot.said))))
    skipped = "".join(
        f"<li><code>{escape(each.figure)}</code>: {escape(each.run)} {escape(each.why)}.</li>"
        for each in measured.skipped
    )
    body.append(section("skipped", "What is not shown", f"<ul>{skipped}</ul>" if skipped else "<p>Nothing.</p>"))
    body.append(section("again", "How to regenerate", f"<pre><code>{escape(content['command'])}</code></pre>"))
    return page(TITLE, ("runs", "To the runs"), "\n".join(body), charts)


def choice_of_runs(title: str, looks: Mapping[str, Style]) -> Choice:
    """The choice of the runs that a chart shows."""
    marks = {name: (look.colour, look.glyph) for name, look in looks.items()}
    return Choice("arm", title, {name: name for name in looks}, marks=marks)


def _chart(name: str, curves: Mapping[str, list[Curve]], looks: Mapping[str, Style]) -> Chart:
    plots = [_plot(panel, of, curves, looks) for panel, of in panels_of(name, curves).items()]
    return Chart(name, FIGURES[name].title, "", plots, [choice_of_runs("Runs", {run: looks[run] for run in curves})])


def _plot(panel: str, of: Panel, curves: Mapping[str, list[Curve]], looks: Mapping[str, Style]) -> Plot:
    traces, positive = [], False
    for run, found in curves.items():
        here = [curve for curve in found if curve.panel == panel]
        for curve in here:
            traces.append(_trace(run, curve, looks[run], faint=len(here) > FAINT))
            positive |= bool((curve.y > 0).any())
    axis: dict[str, Any] = {"title": {"text": escaped(of.y)}, "automargin": True}
    if of.log and positive:
        # Of more ticks plotly names all nine digits between powers of ten, which then lie over each other.
        axis |= {"type": "log", "exponentformat": "power", "nticks": 3}
    shape = layout(xaxis={"title": {"text": escaped(of.x)}, "automargin": True}, yaxis=axis)
    return Plot(of.title, traces, shape, height=330)


def _trace(run: str, curve: Curve, look: Style, faint: bool) -> dict[str, Any]:
    import plotly.graph_objects as graph

    x, y = thinned(curve)
    points = curve.kind == "points"
    mode = "markers" if points else "lines+markers" if len(x) <= 40 else "lines"
    made = graph.Scatter(
        x=x.tolist(),
        y=[value if math.isfinite(value) else None for value in y.tolist()],
        meta={"arm": run, "label": escaped(f"{run} {curve.name}".strip())},
        mode=mode,
        opacity=0.5 if faint or points else 1.0,
        line=None if points else {"color": look.colour, "width": 2, "dash": DASHES[curve.kind]},
        marker={"color": look.colour, "symbol": look.symbol, "size": 4 if points else 6},
        hovertemplate="%{meta.label}<br>%{x:.6g}: %{y:.6g}<extra></extra>",
    )
    return dict(made.to_plotly_json())
