"""A page: one HTML file with figures, script and numbers inside, which needs no network. Every text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ngpt_train.report.page.chart import Chart, Choice, Plot, Style, as_json

HERE = Path(__file__).parent
# The browser may use the script and style inside the page. No request leaves the page, whatever a name in it holds.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
ALL_OR_NONE = 5  # a choice with so many options has buttons for all and for none
SHORT = 20  # letters of a cell that is not broken into lines


def page(title: str, skip: tuple[str, str], body: str, charts: Sequence[Chart]) -> str:
    """skip: the anchor and the words of the first link. body: HTML with a `header` and a `figure` for each chart."""
    anchor, words = skip
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{(HERE / "page.css").read_text()}
</style>
</head>
<body>
<a class="skip" href="#{escape(anchor)}">{escape(words)}</a>
<main class="page">
{body}
</main>
<script type="application/json" id="charts">{as_json(charts)}</script>
<script>
{(HERE / "page.js").read_text()}
</script>
</body>
</html>
"""


def header(title: str, facts: str) -> str:
    theme = '<button id="theme" type="button" data-theme="auto" hidden>Theme: auto</button>'
    return f'<header>\n<h1>{escape(title)}</h1>\n<p class="facts">{escape(facts)}</p>\n{theme}\n</header>'


def again(command: str) -> str:
    return section("again", "How to regenerate", f"<pre><code>{escape(command)}</code></pre>")


def section(anchor: str, title: str, content: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{content}</section>'


def links(sections: Mapping[str, str]) -> str:
    """A link to each section, anchor -> title."""
    found = "".join(f'<a href="#{anchor}">{escape(title)}</a> ' for anchor, title in sections.items())
    return f'<nav aria-label="Sections">{found}</nav>'


def figure(chart: Chart, title_of: Callable[[Plot], str] = lambda plot: escape(plot.title)) -> str:
    """title_of: the HTML of a plot's title."""
    choices = "".join(_choice(chart, choice) for choice in chart.choices)
    plots = "".join(_plot(chart, plot, title_of(plot)) for plot in chart.plots)
    note = f'<figcaption class="note">{escape(chart.note)}</figcaption>' if chart.note else ""
    return f"""<figure data-chart="{chart.name}">
{note}
<div class="choices">{choices}</div>
<div class="plots{" many" if len(chart.plots) > 1 else ""}">{plots}</div>
</figure>"""


def _plot(chart: Chart, plot: Plot, title: str) -> str:
    said = f"{chart.title}: {plot.title}" if plot.title else chart.title
    title = f"<h3>{title}</h3>" if title else ""
    return f'<div>{title}<div class="plot" role="img" aria-label="{escape(said)}"></div></div>'


def _choice(chart: Chart, choice: Choice) -> str:
    """Hidden if there is nothing to choose, except the arms, which are also the figure's legend."""
    options = []
    for value, words in choice.options.items():
        mark = glyph(chart.looks[value]) if choice.name == "arm" else ""
        options.append(
            f'<label class="chip"><input type="{"checkbox" if choice.many else "radio"}" '
            f'name="{chart.name}-{choice.name}" data-choice="{choice.name}" value="{escape(value)}"'
            f"{' checked' if value in choice.at_first else ''}>{mark}<span>{escape(words)}</span></label>"
        )
    if choice.many and len(options) >= ALL_OR_NONE:
        options += [f'<button type="button" data-all="{x}">{y}</button>' for x, y in (("yes", "all"), ("no", "none"))]
    legend = ' class="legend"' if choice.name == "arm" else ""
    hidden = " hidden" if len(choice.options) < 2 and choice.name not in ("arm", "part") else ""
    return (
        f"<fieldset{legend}{hidden}><legend>{escape(choice.label)}</legend>"
        f'<div class="options">{"".join(options)}</div></fieldset>'
    )


def glyph(look: Style) -> str:
    return f'<span class="glyph" style="color:{look.colour}" aria-hidden="true">{look.glyph}</span>'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A plain table. The rows have the same keys, the titles of the columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = "".join("<tr>" + "".join(_cell(_said(row.get(column))) for column in columns) + "</tr>" for row in rows)
    return scrolled("Table", f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>")


def scrolled(name: str, content: str) -> str:
    """A table with a scroll bar on a narrow screen."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>{content}</table></div>'


def _cell(text: str) -> str:
    return f"<td class={'wrap' if len(text) > SHORT else 'short'}>{escape(text)}</td>"


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
