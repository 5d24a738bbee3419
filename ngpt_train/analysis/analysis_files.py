"""The files of `analyze`: analysis.json and analysis.parquet with all digits of every point; page.html, which opens
without a network, and each figure as PNG and SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.analysis.measures.of_run import Curve
from ngpt_train.analysis.paper_figures import FIGURES, LAYER, STEP, Measured, Panel
from ngpt_train.core.files import write_atomically
from ngpt_train.core.recorded import finite
from ngpt_train.report.page.chart import Axis, Chart, Mark, Plot, styles
from ngpt_train.report.page.html import again, figure, header, links, page, section, table
from ngpt_train.report.page.pictures import Picture, write_picture


def as_json(measured: Measured, runs: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """The content of analysis.json. Infinities and NaN are null. runs: a table with a row for each run."""
    figures = {}
    for name, curves in measured.curves.items():
        figure = FIGURES[name]
        panels: dict[str, Any] = {
            panel: {"title": of.title, "x": of.x, "y": of.y, "curves": []} for panel, of in figure.panels.items()
        }
        for run, found in curves.items():
            for curve in found:
                panels[curve.panel]["curves"].append(_curve(run, curve))
        definition = figure.definition or " ".join((figure.measure.__doc__ or "").split("\n\n")[0].split())
        shown = {panel: of for panel, of in panels.items() if of["curves"]}
        figures[name] = {"title": figure.title, "definition": definition, "panels": shown}
    skipped = [vars(each) for each in measured.skipped]
    return {"runs": list(runs), "figures": figures, "skipped": skipped, "command": command}


def _curve(run: str, curve: Curve) -> dict[str, Any]:
    numbers = {"x": curve.x, "y": curve.y, "edges": curve.edges}
    there = {name: finite(x.tolist()) for name, x in numbers.items() if x is not None}
    return {"run": run, "name": curve.name, **there}


def write_parquet(measured: Measured, path: Path) -> None:
    """Writes a row for each point: figure, panel, run, curve, x and y. x and y may be infinite or NaN."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = dict.fromkeys(("figure", "panel", "run", "curve"), pa.string())
    schema = pa.schema({**texts, "x": pa.float64(), "y": pa.float64()})
    parts = [schema.empty_table()]
    for name, of_figure in measured.curves.items():
        for run, found in of_figure.items():
            for curve in found:
                columns = [pa.repeat(text, len(curve.x)) for text in (name, curve.panel, run, curve.name)]
                columns += [pa.array(values, pa.float64()) for values in (curve.x, curve.y)]
                parts.append(pa.table(columns, schema=schema))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables(parts), sink)
    write_atomically(path, sink.getvalue().to_pybytes())


TITLE = "Measurements of the papers"
MOST_POINTS = 500  # of a curve in a picture and on the page; analysis.json has all
FEW_POINTS = 40  # a curve with at most so many points has symbols
FAINT = 4  # more curves of a run in a panel, such as one for each head, are fainter


def write_pictures(measured: Measured, runs: Sequence[str], folder: Path) -> None:
    """Writes NAME.png and NAME.svg of each figure into `folder`, which it makes."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts(measured, runs):
        write_picture(chart, Picture(), folder, chart.name)


def html(measured: Measured, content: Mapping[str, Any]) -> str:
    """page.html. content: of analysis.json."""
    names = [str(run["name"]) for run in content["runs"]]
    drawn = charts(measured, names)
    sections = {"runs": "Runs", **{chart.name: chart.name.replace("_", " ") for chart in drawn}}
    many = "s" * (len(names) != 1)
    body = [
        header(
            TITLE,
            f"{len(names)} run{many}, {len(drawn)} figures. analysis.json and analysis.parquet have every number.",
        ),
        section("runs", "Runs", table(content["runs"])),
        links(sections | {"skipped": "What is not shown", "again": "How to regenerate"}),
        '<noscript><p class="box warn">The figures need JavaScript. The folder <code>figures</code> has them as '
        "pictures.</p></noscript>",
    ]
    for chart in drawn:
        note = f'<p class="note">{escape(content["figures"][chart.name]["definition"])}</p>'
        body.append(section(chart.name, chart.title, note + figure(chart)))
    skipped = "".join(
        f"<li><code>{escape(each.figure)}</code>: {escape(each.run)} {escape(each.why)}.</li>"
        for each in measured.skipped
    )
    body.append(section("skipped", "What is not shown", f"<ul>{skipped}</ul>" if skipped else "<p>Nothing.</p>"))
    body.append(again(content["command"]))
    return page(TITLE, ("runs", "To the runs"), "\n".join(body), drawn)


def charts(measured: Measured, runs: Sequence[str]) -> list[Chart]:
    """A chart for each figure."""
    found, looks = [], styles(runs, runs[0])
    for name, curves in measured.curves.items():
        filled = {curve.panel for of_run in curves.values() for curve in of_run}
        panels = {panel: of for panel, of in FIGURES[name].panels.items() if panel in filled}
        plots = [_plot(panel, of, curves) for panel, of in panels.items()]
        chart = Chart(name, FIGURES[name].title, "", plots, looks, {run: run for run in runs})
        chart.choices.append(chart.choice_of_arms("Runs"))
        found.append(chart)
    return found


def _plot(panel: str, of: Panel, curves: Mapping[str, list[Curve]]) -> Plot:
    marks = []
    for run, found in curves.items():
        here = [curve for curve in found if curve.panel == panel]
        n_lines = sum(curve.kind != "points" for curve in here)
        named = 1 < n_lines <= FAINT + 1 and len(curves) <= 2
        marks += [_mark(run, curve, len(here) > FAINT, named and curve.kind != "points") for curve in here]
    log = of.log and any((curve.y > 0).any() for found in curves.values() for curve in found if curve.panel == panel)
    x = Axis(of.x, whole=of.x in (LAYER, "batch", STEP))
    return Plot(marks, [x], [Axis(of.y, log=log)], of.title, height=330)


def _mark(run: str, curve: Curve, faint: bool, named: bool) -> Mark:
    x, y = thinned(curve)
    points = curve.kind == "points"
    size = (4.0 if points else 6.0) if points or len(x) <= FEW_POINTS else 0.0
    return Mark(
        run,
        x.tolist(),
        y.tolist(),
        hover=f"{{arm}} {curve.name}".rstrip() + "\n{x:6g}: {y:6g}",
        line=0.0 if points else 2.0,
        dotted=curve.kind == "dotted",
        size=size,
        opacity=0.5 if faint or points else 1.0,
        label=curve.name if named and len(x) else "",
    )


def thinned(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS of the points, evenly among them, the first and the last included."""
    if len(curve.x) <= MOST_POINTS or curve.edges is not None:
        return curve.x, curve.y
    kept = np.unique(np.linspace(0, len(curve.x) - 1, MOST_POINTS).round().astype(int))
    return curve.x[kept], curve.y[kept]
