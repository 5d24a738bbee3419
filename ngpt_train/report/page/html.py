"""The page: one HTML file with its figures, its library and its numbers inside, and the HTML of figures and switches.
Every text goes through `escape`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from ngpt_train.report.page.charts import Chart, Choice, Plot, data

HERE = Path(__file__).parent
# What the browser is allowed: the script and style inside the page. No request leaves it, whatever a name in it holds.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
ALL_OR_NONE = 5  # from so many options on there are buttons for all and for none
THEME = '<button id="theme" type="button" data-theme="auto" hidden>Theme: auto</button>'


def page(title: str, skip: tuple[str, str], body: str, charts: Sequence[Chart]) -> str:
    """The page, some 5 MB. No part of it comes from elsewhere. skip: the anchor and the words of the first link; body:
    HTML, which has THEME in it and a `figure_of` each chart."""
    from plotly.offline import get_plotlyjs

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
<script type="application/json" id="charts">{data(charts)}</script>
<script>{get_plotlyjs()}</script>
<script>
{(HERE / "page.js").read_text()}
</script>
</body>
</html>
"""


def section(anchor: str, title: str, content: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{content}</section>'


def figure_of(chart: Chart, title_of: Callable[[Plot], str]) -> str:
    """title_of: the HTML of a plot's title."""
    choices = "".join(_choice(chart.name, choice) for choice in chart.choices)
    plots = "".join(_plot(plot, title_of(plot)) for plot in chart.plots)
    note = f'<figcaption class="note">{escape(chart.note)}</figcaption>' if chart.note else ""
    return f"""<figure data-chart="{chart.name}">
{note}
<div class="choices">{choices}</div>
<div class="plots{" many" if len(chart.plots) > 1 else ""}">{plots}</div>
</figure>"""


def _plot(plot: Plot, title: str) -> str:
    title = f"<h3>{title}</h3>" if title else ""
    return f'<div>{title}<div class="plot" role="img" aria-label="{escape(plot.said)}"></div></div>'


def _choice(chart: str, choice: Choice) -> str:
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
        options += [f'<button type="button" data-all="{x}">{y}</button>' for x, y in (("yes", "all"), ("no", "none"))]
    legend = ' class="legend"' if choice.name == "arm" else ""
    hidden = " hidden" if len(choice.options) < 2 and choice.name not in ("arm", "part") else ""
    return (
        f"<fieldset{legend}{hidden}><legend>{escape(choice.label)}</legend>"
        f'<div class="options">{"".join(options)}</div></fieldset>'
    )
