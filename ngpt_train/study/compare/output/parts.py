"""Tables, figures and their switches as HTML. Every text of the report goes through `escape`."""

from __future__ import annotations

from html import escape

from ngpt_train.study.compare.output.sheet import Chart, Choice, Plot
from ngpt_train.study.compare.output.style import Style, styles
from ngpt_train.study.compare.output.tables import Cell, Table
from ngpt_train.study.compare.output.wording import DASH, Report, stamps

FOLDED = (
    "speedups",
    "differences",
    "runs",
)  # tables that open at a click; a figure above says the same, or they are long
ALL_OR_NONE = 5  # from so many options on there are buttons for all and for none


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
        choices = "".join(self.choice(chart.name, choice) for choice in chart.choices)
        plots = "".join(map(self.plot, chart.plots))
        note = f'<figcaption class="note">{escape(chart.note)}</figcaption>' if chart.note else ""
        return f"""<figure data-chart="{chart.name}">
{note}
<div class="choices">{choices}</div>
<div class="plots{" many" if len(chart.plots) > 1 else ""}">{plots}</div>
</figure>"""

    def plot(self, plot: Plot) -> str:
        title = f"<h3>{self.arm(plot.arm)}</h3>" if plot.arm is not None else ""
        return f'<div>{title}<div class="plot" role="img" aria-label="{escape(plot.said)}"></div></div>'

    def choice(self, chart: str, choice: Choice) -> str:
        """Hidden where there is nothing to choose; never the arms, which are the figure's legend too."""
        first = choice.first or (tuple(choice.options) if choice.many else tuple(choice.options)[:1])
        options = []
        for value, words in choice.options.items():
            colour, glyph = choice.marks.get(value, ("", ""))
            mark = f'<span style="color:{colour}" aria-hidden="true">{glyph}</span>' if glyph else ""
            options.append(
                f'<label class="chip"><input type="{"checkbox" if choice.many else "radio"}" '
                f'name="{chart}-{choice.name}" data-choice="{choice.name}" value="{escape(value)}"'
                f"{' checked' if value in first else ''}>{mark}<span>{escape(words)}</span></label>"
            )
        if choice.many and len(options) >= ALL_OR_NONE:
            options += [
                f'<button type="button" data-all="{x}">{y}</button>' for x, y in (("yes", "all"), ("no", "none"))
            ]
        legend = ' class="legend"' if choice.name == "arm" else ""
        hidden = " hidden" if len(choice.options) < 2 and choice.name not in ("arm", "part") else ""
        return (
            f"<fieldset{legend}{hidden}><legend>{escape(choice.label)}</legend>"
            f'<div class="options">{"".join(options)}</div></fieldset>'
        )
