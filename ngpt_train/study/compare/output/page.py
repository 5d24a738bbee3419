"""The page of a comparison: its first screen and its sections."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ngpt_train.core.files import write_atomically
from ngpt_train.report.page.charts import Chart
from ngpt_train.report.page.html import THEME, page, section
from ngpt_train.study.compare.output import budget_charts, run_charts, tables, tuning_charts, verdicts
from ngpt_train.study.compare.output.first_page import NO_CONFOUNDS, cautions, confound, confounds, facts, looked_at
from ngpt_train.study.compare.output.parts import Parts
from ngpt_train.study.compare.output.sheet import Sheet
from ngpt_train.study.compare.output.wording import Report

CHARTS = (
    budget_charts.speedup,
    budget_charts.difference,
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
    sheet = Sheet(report)
    charts = [chart for chart in (make(sheet) for make in CHARTS) if any(plot.traces for plot in chart.plots)]
    body = "\n".join([*_first_screen(report, charts), *_sections(report, charts)])
    title = f"{report['title']}: which is better, by how much, how sure"
    return page(title, ("verdicts", "To the verdicts"), body, charts)


def _first_screen(report: Report, charts: list[Chart]) -> list[str]:
    """What it is about, its confounds, the verdicts."""
    parts, keys = Parts(report), verdicts.tuning_of_keys(report)
    links = [("verdicts", "Verdicts"), (keys.name, "What was tuned"), *((chart.name, chart.title) for chart in charts)]
    links += [("differences", "Noise"), ("referee", "What differs"), ("failures", "Failures"), ("audits", "Audits")]
    links += [("again", "How to regenerate")]
    nav = "".join(f'<a href="#{anchor}">{escape(title)}</a> ' for anchor, title in links)
    return [
        f"""<header>
<h1>{escape(str(report["title"]))}</h1>
<p class="facts">{escape(" · ".join(facts(report)))}</p>
{THEME}
</header>""",
        _confounds(report),
        "".join(f'<p class="box warn">{escape(sentence)}</p>' for sentence in cautions(report)),
        f'<section id="verdicts"><h2>Verdicts</h2>{parts.cards(verdicts.verdicts(report))}</section>',
        section(keys.name, keys.title, parts.table(keys)),
        f'<nav aria-label="Sections">{nav}</nav>',
        """<noscript><p class="box warn">The figures need JavaScript. The tables hold their numbers, and the folder
<code>figures</code> beside report.md has them as pictures.</p></noscript>""",
    ]


def _confounds(report: Report) -> str:
    found = confounds(report)
    keys = len({entry["key"] for entry in found})
    first = f"<p>{escape(NO_CONFOUNDS)}</p>"
    if found:
        items = "".join(f"<li><code>{escape(x['key'])}</code> {escape(confound(x))}</li>" for x in found)
        first = (
            f"<p><strong>{keys} confound{'s' * (keys != 1)}</strong>, any of which may be the cause of a difference."
            f"</p><ul>{items}</ul>"
        )
    seen = " ".join(looked_at(report))
    return (
        f'<div class="box{" warn" * bool(found)}" id="confounds">{first}<p>{escape(seen)} '
        '<a href="#referee">All that differs</a></p></div>'
    )


def _sections(report: Report, charts: list[Chart]) -> list[str]:
    parts = Parts(report)
    made = []
    for chart in charts:
        table = parts.table(BENEATH[chart.name](report)) if chart.name in BENEATH else ""
        made.append(section(chart.name, chart.title, parts.chart(chart) + table))
    for make in (tables.differences, tables.referee, tables.failures, tables.audits):
        found = make(report)
        made.append(section(found.name, found.title, parts.table(found)))
    notes = "".join(f"<li>{escape(note)}</li>" for note in report["notes"])
    if notes:
        made.append(section("notes", "Notes", f"<ul>{notes}</ul>"))
    commands = escape("\n".join(report["commands"]))
    commits = ", ".join(f"<code>{escape(str(commit))}</code>" for commit in report["commits"]) or "not known"
    again = f"<p>Commit: {commits}.</p><pre><code>{commands}</code></pre>{parts.table(tables.runs(report))}"
    return [*made, section("again", "How to regenerate every number", again)]
