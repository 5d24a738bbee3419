"""The page: one HTML file with its figures, its library and its numbers inside, which opens without a network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from ngpt_train.core.files import write_atomically
from ngpt_train.study.compare.output import budget_charts, run_charts, tables, tuning_charts
from ngpt_train.study.compare.output.parts import Parts
from ngpt_train.study.compare.output.sheet import Chart, Sheet
from ngpt_train.study.compare.output.wording import Report, cautions, confounds, facts, label, size_text

HERE = Path(__file__).parent
# What the browser is allowed: the script and style inside the page. No request leaves it, whatever a name in it holds.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
CHARTS = (
    budget_charts.speedup,
    budget_charts.end_loss,
    run_charts.curves,
    tuning_charts.tuning,
    tuning_charts.sensitivity,
    run_charts.costs,
)
# Which table stands beneath which chart.
BENEATH = {
    "speedup": tables.speedups,
    "end-loss": tables.end_loss,
    "tuning-curves": tables.tuning,
    "memory-and-time": tables.costs,
}


def write_page(report: Report, path: Path) -> None:
    """Writes the page of `report` (report.json) to `path`, some 5 MB. No part of it comes from elsewhere."""
    write_atomically(path, html(report).encode())


def html(report: Report) -> str:
    from plotly.offline import get_plotlyjs

    sheet = Sheet(report)
    charts = [chart for chart in (make(sheet) for make in CHARTS) if any(plot.traces for plot in chart.plots)]
    body = "\n".join([*_first_screen(report, charts), *_sections(report, charts)])
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(str(report["title"]))}: which is better, by how much, how sure</title>
<link rel="icon" href="data:,">
<style>
{(HERE / "page.css").read_text()}
</style>
</head>
<body>
<a class="skip" href="#verdicts">To the verdicts</a>
<main class="page">
{body}
</main>
<script type="application/json" id="charts">{data(charts)}</script>
<script>{get_plotlyjs()}</script>
<script>
{(HERE / "page.js").read_text()}
</script>
</body>
</html>
"""


def data(charts: list[Chart]) -> str:
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
    """Seven digits of every number are more than a screen shows; report.json has all."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _short(x) for key, x in value.items()}
    return [_short(x) for x in value] if isinstance(value, (list, tuple)) else value


def _first_screen(report: Report, charts: list[Chart]) -> list[str]:
    """What it is about, its confounds, the verdicts."""
    parts = Parts(report)
    links = [("verdicts", "Verdicts"), *((chart.name, chart.title) for chart in charts)]
    links += [("differences", "Noise"), ("referee", "What differs"), ("failures", "Failures"), ("audits", "Audits")]
    links += [("again", "How to regenerate")]
    nav = "".join(f'<a href="#{anchor}">{escape(title)}</a> ' for anchor, title in links)
    return [
        f"""<header>
<h1>{escape(str(report["title"]))}</h1>
<p class="facts">{escape(" · ".join(facts(report)))}</p>
<button id="theme" type="button" data-theme="auto" hidden>Theme: auto</button>
</header>""",
        _confounds(report),
        "".join(f'<p class="box warn">{escape(sentence)}</p>' for sentence in cautions(report)),
        f'<section id="verdicts"><h2>Verdicts</h2>{parts.cards(tables.verdicts(report))}</section>',
        f'<nav aria-label="Sections">{nav}</nav>',
        """<noscript><p class="box warn">The figures need JavaScript. The tables hold their numbers, and the folder
<code>figures</code> beside report.md has them as pictures.</p></noscript>""",
    ]


def _confounds(report: Report) -> str:
    by_key: dict[str, list[str]] = {}
    for entry in confounds(report):
        size = f": {size_text(entry['size'])}" if entry["size"] is not None else ""
        by_key.setdefault(entry["key"], []).append(f"{', '.join(label(report, arm) for arm in entry['arms'])}{size}")
    if not by_key:
        return '<p class="box" id="confounds"><strong>No confounds</strong> were found between the arms.</p>'
    items = "; ".join(f"<code>{escape(key)}</code> ({escape(', '.join(of))})" for key, of in by_key.items())
    return (
        f'<p class="box warn" id="confounds"><strong>{len(by_key)} confound{"s" * (len(by_key) != 1)}</strong>, any of '
        f'which may be the cause of a difference: {items}. <a href="#referee">All that differs</a></p>'
    )


def _sections(report: Report, charts: list[Chart]) -> list[str]:
    parts = Parts(report)
    made = []
    for chart in charts:
        table = parts.table(BENEATH[chart.name](report)) if chart.name in BENEATH else ""
        made.append(_section(chart.name, chart.title, parts.chart(chart) + table))
    for make in (tables.differences, tables.referee, tables.failures, tables.audits):
        found = make(report)
        made.append(_section(found.name, found.title, parts.table(found)))
    notes = "".join(f"<li>{escape(note)}</li>" for note in report["notes"])
    if notes:
        made.append(_section("notes", "Notes", f"<ul>{notes}</ul>"))
    commands = escape("\n".join(report["commands"]))
    commits = ", ".join(f"<code>{escape(str(commit))}</code>" for commit in report["commits"]) or "not known"
    again = f"<p>Commit: {commits}.</p><pre><code>{commands}</code></pre>{parts.table(tables.runs(report))}"
    return [*made, _section("again", "How to regenerate every number", again)]


def _section(anchor: str, title: str, content: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{content}</section>'
