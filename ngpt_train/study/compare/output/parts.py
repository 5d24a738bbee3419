"""Tables, figures and their switches as HTML. Every text of the report goes through `escape`."""

from __future__ import annotations

from html import escape

from ngpt_train.report.page.charts import Chart
from ngpt_train.report.page.html import figure_of
from ngpt_train.report.page.style import Style, styles
from ngpt_train.study.compare.output.tables import Cell, Table
from ngpt_train.study.compare.output.wording import DASH, Report, stamps

FOLDED = (
    "speedups",
    "differences",
    "runs",
)  # tables that open at a click; a figure above says the same, or they are long


class Parts:
    def __init__(self, report: Report) -> None:
        self.report = report
        self.styles: dict[str, Style] = styles(report["arms"], report["baseline"])

    def arm(self, name: str, said: str = "") -> str:
        """Its mark, its name, its stamps but the one that is `said` beside it."""
        style = self.styles[name]
        marks = "".join(
            f'<span class="stamp {stamp.replace(" ", "-")}">{stamp}</span>'
            for stamp in stamps(self.report, name)
            if stamp != said
        )
        glyph = f'<span class="glyph" style="color:{style.colour}" aria-hidden="true">{style.glyph}</span>'
        return f'{glyph}<span class="name">{escape(name)}</span>{marks}'

    def cell(self, cell: Cell, label: str = "", said: str = "") -> str:
        """`label` names the column where a narrow screen shows the row as a card."""
        kind = {"number": "n", "code": "wrap", "": "wrap"}.get(cell.kind, cell.kind)
        text = f"<code>{escape(cell.text)}</code>" if cell.kind == "code" else escape(cell.text)
        if cell.arm is not None:
            kind, text, label = "arm", self.arm(cell.arm, said), ""
        if cell.kind == "verdict":
            kind = f"verdict {escape(cell.text.split(' ')[0])}"
        if cell.text == DASH:
            kind += " none"
        named = f' data-label="{escape(label)}"' if label else ""
        return f'<td class="{kind}"{named}>{text}</td>'

    def head(self, table: Table, columns: int) -> str:
        names = "".join(
            f'<th scope="col"{" class=n" if cell.kind == "number" else ""}>{escape(name)}</th>'
            for name, cell in list(zip(table.columns, table.rows[0], strict=True))[:columns]
        )
        return f"<thead><tr>{names}</tr></thead>"

    def table(self, table: Table) -> str:
        if not table.rows:
            return f'<p class="note">{escape(table.empty)}</p>'
        rows = "".join(f"<tr>{''.join(map(self.cell, row))}</tr>" for row in table.rows)
        note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
        found = (
            f'{note}<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
            f"<table>{self.head(table, len(table.columns))}<tbody>{rows}</tbody></table></div>"
        )
        if table.name not in FOLDED:
            return found
        return f"<details><summary>{escape(table.title)}: {len(table.rows)} rows</summary>{found}</details>"

    def cards(self, table: Table) -> str:
        """A table whose last column is sentences: they stand beneath their row."""
        *names, _ = table.columns
        bodies = []
        for *cells, words in table.rows:
            verdict = next((cell.text for cell in cells if cell.kind == "verdict"), "")
            row = "".join(self.cell(cell, name, verdict) for name, cell in zip(names, cells, strict=True))
            sentences = f'<td colspan="{len(names)}"><p>{escape(words.text)}</p></td>'
            bodies.append(f'<tbody><tr>{row}</tr><tr class="words">{sentences}</tr></tbody>')
        note = f'<p class="note">{escape(table.note)}</p>'
        return f'<table class="cards">{self.head(table, len(names))}{"".join(bodies)}</table>{note}'

    def chart(self, chart: Chart) -> str:
        return figure_of(chart, lambda plot: self.arm(plot.arm) if plot.arm is not None else "")
