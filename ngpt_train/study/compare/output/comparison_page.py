"""report.html: one page with verdicts, figures and tables. It needs no network."""

from collections.abc import Sequence
from html import escape

from ngpt_train.report.page.chart import Chart, Plot
from ngpt_train.report.page.html import figure, glyph, header, links, page, scrolled, section
from ngpt_train.report.rounded import DASH
from ngpt_train.study.compare.output import charts, tables, wording
from ngpt_train.study.compare.output.study_tables import descents, interactions
from ngpt_train.study.compare.output.tables import Table
from ngpt_train.study.compare.output.wording import Report

# The table beneath a figure.
BENEATH = {
    "speedup": tables.speedups,
    "end-loss": tables.end_loss,
    "tuning-curves": tables.tuning,
    "memory-and-time": tables.costs,
}
# Tables that open at a click, because they are long or a figure above shows the same.
FOLDED = ("speedups", "differences", "runs")


def html(report: Report) -> str:
    """The page of report.json."""
    made = [make(report) for make in charts.CHARTS]
    drawn = [chart for chart in made if any(plot.marks for plot in chart.plots)]
    body = "\n".join([*_first_screen(report, drawn), *_sections(report, drawn)])
    title = f"{report['title']}: which is better, by how much, how sure"
    return page(title, ("verdicts", "To the verdicts"), body, drawn)


def _first_screen(report: Report, drawn: list[Chart]) -> list[str]:
    """Title, confounds and verdicts."""
    keys = tables.tuning_of_keys(report)
    sections = {"verdicts": "Verdicts", keys.name: "What was tuned", **{chart.name: chart.title for chart in drawn}}
    sections |= {"differences": "Noise", "referee": "What differs", "failures": "Failures", "audits": "Audits"}
    return [
        header(str(report["title"]), " · ".join(wording.facts(report))),
        _confounds(report),
        "".join(f'<p class="box warn">{escape(sentence)}</p>' for sentence in wording.cautions(report)),
        f'<section id="verdicts"><h2>Verdicts</h2>{_cards(report, tables.verdicts(report))}</section>',
        section(keys.name, keys.title, _table(report, keys)),
        links(sections | {"again": "How to regenerate"}),
        """<noscript><p class="box warn">The figures need JavaScript. The tables hold their numbers, and the folder
<code>figures</code> beside report.md has them as pictures.</p></noscript>""",
    ]


def _confounds(report: Report) -> str:
    found = wording.confounds(report)
    keys = len({key for of_entry, _ in found for key in of_entry})
    first = f"<p>{escape(wording.NO_CONFOUNDS)}</p>"
    if found:
        items = "".join(
            f"<li><code>{escape(', '.join(of))}</code> {escape(wording.confound(entry))}</li>" for of, entry in found
        )
        first = (
            f"<p><strong>{keys} confound{'s' * (keys != 1)}</strong>, any of which may be the cause of a difference."
            f"</p><ul>{items}</ul>"
        )
    seen = " ".join(wording.looked_at(report))
    return (
        f'<div class="box{" warn" * bool(found)}" id="confounds">{first}<p>{escape(seen)} '
        '<a href="#referee">All that differs</a></p></div>'
    )


def _sections(report: Report, drawn: list[Chart]) -> list[str]:
    made = []
    names = {chart.labels[arm]: arm for chart in drawn for arm in chart.labels}

    def title_of(plot: Plot) -> str:
        return _arm(report, names[plot.title]) if plot.title in names else escape(plot.title)

    for chart in drawn:
        beneath = _table(report, BENEATH[chart.name](report)) if chart.name in BENEATH else ""
        made.append(section(chart.name, chart.title, figure(chart, title_of) + beneath))
    others = (make(report) for make in (tables.differences, tables.referee, tables.failures, tables.audits))
    for found in (*interactions(report), *descents(report), *others):
        made.append(section(found.name, found.title, _table(report, found)))
    if said := "".join(f"<li>{escape(note)}</li>" for note in wording.notes(report)):
        made.append(section("notes", "Notes", f"<ul>{said}</ul>"))
    commands = escape("\n".join(report["commands"]))
    commits = ", ".join(f"<code>{escape(str(commit))}</code>" for commit in report["commits"]) or "not known"
    again = f"<p>Commit: {commits}.</p><pre><code>{commands}</code></pre>{_table(report, tables.runs(report))}"
    return [*made, section("again", "How to regenerate every number", again)]


def _arm(report: Report, name: str) -> str:
    """The arm's mark, name and stamp. That it is not resolved is said by the table of verdicts alone."""
    stamp = "" if wording.is_tuned(report, name) else '<span class="stamp untuned">untuned</span>'
    return f'{glyph(charts.looks_of(report)[name])}<span class="name">{escape(name)}</span>{stamp}'


def _cell(report: Report, text: str, kind: str, label: str) -> str:
    """label: the name of the column, for rows that a narrow screen shows as cards."""
    shown, look = escape(text), "n" if kind == tables.NUMBER else "wrap"
    if kind == tables.ARM and text in report["arms"]:
        shown, look, label = _arm(report, text), "arm", ""
    elif kind == tables.CODE:
        shown = f"<code>{shown}</code>" if text else DASH
    elif kind == tables.VERDICT:
        look = f"verdict {escape(text.split(' ')[0])}"
    look += " none" * (text == DASH)
    named = f' data-label="{escape(label)}"' if label else ""
    return f'<td class="{look}"{named}>{shown}</td>'


def _row(report: Report, table: Table, texts: Sequence[str], is_card: bool = False) -> str:
    cells = zip(texts, table.columns, strict=True)
    return f"<tr>{''.join(_cell(report, text, kind, name * is_card) for text, (name, kind) in cells)}</tr>"


def _head(columns: tables.Columns) -> str:
    names = "".join(
        f'<th scope="col"{" class=n" if kind == tables.NUMBER else ""}>{escape(name)}</th>' for name, kind in columns
    )
    return f"<thead><tr>{names}</tr></thead>"


def _table(report: Report, table: Table) -> str:
    if not table.rows:
        return f'<p class="note">{escape(table.empty)}</p>'
    table = table.condensed()
    body = "".join(_row(report, table, row) for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    found = note + scrolled(table.title, f"{_head(table.columns)}<tbody>{body}</tbody>")
    if table.name not in FOLDED:
        return found
    return f"<details><summary>{escape(table.title)}: {len(table.rows)} rows</summary>{found}</details>"


def _cards(report: Report, table: Table) -> str:
    """The table of verdicts. A narrow screen shows its rows as cards."""
    table = table.condensed()
    body = "".join(f"<tbody>{_row(report, table, row, is_card=True)}</tbody>" for row in table.rows)
    return f'<table class="cards">{_head(table.columns)}{body}</table><p class="note">{escape(table.note)}</p>'
