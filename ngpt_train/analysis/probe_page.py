"""page.html of `probe`: losses by class, and rows to read, which opens without a network."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ngpt_train.report.page.chart import Axis, Chart, Mark, Plot, Style, rows, styles
from ngpt_train.report.page.html import again, figure, header, links, page, section, table

TITLE = "Where the loss is"
FULL = 3.0  # nats: a token with this loss, or difference of losses, or more has the full colour


def html(report: Mapping[str, Any]) -> str:
    """page.html. report: the content of probe.json."""
    names = [model["name"] for model in report["models"]]
    looks = styles(names, names[0])
    charts = [_chart(each, names, looks) for each in report["classes"]] + [_positions(report, names, looks)]
    for chart in charts:
        chart.choices.append(chart.choice_of_arms("Models"))
    facts = f"{report['data']}, {report['rows_evaluated']:,} validation rows, rows_hash {report['rows_hash']}."
    title_of_rows = "Rows where the models differ most" if len(names) == 2 else "Rows with the largest loss"
    sections = {chart.name: chart.title for chart in charts} | {"rows": "Rows"}
    body = [
        header(TITLE, facts),
        section("models", "Models", table(report["models"])),
        links(sections),
    ]
    for chart, each in zip(charts, report["classes"], strict=False):
        says = f'<p class="note">{escape(sign(names))}</p>' if len(names) == 2 else ""
        lines = says + table(class_rows(each, names))
        body.append(section(chart.name, chart.title, figure(chart) + lines))
    body.append(section(charts[-1].name, charts[-1].title, figure(charts[-1])))
    body.append(section("rows", title_of_rows, _legend(looks) + "".join(_row(row, looks) for row in report["rows"])))
    body.append(again(report["command"]))
    return page(TITLE, ("models", "To the models"), "\n".join(body), charts)


def class_rows(each: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Lines of a table: for each class its targets, and for each model the mean loss and the share of the summed loss.
    For two models also the second loss minus the first, as in `compare` an arm minus the baseline."""
    total = {name: sum(of["loss_sum"][name] for of in each["classes"]) or 1.0 for name in names}
    targets = sum(of["targets"] for of in each["classes"])
    lines = []
    for of in each["classes"]:
        line: dict[str, Any] = {each["kind"]: of["class"], "targets": of["targets"]}
        line["of all targets"] = f"{of['targets'] / targets:.1%}"
        for name in names:
            line[f"loss, {name}"] = f"{of['loss'][name]:.4f}"
            line[f"of its loss, {name}"] = f"{of['loss_sum'][name] / total[name]:.1%}"
        if len(names) == 2:
            first, second = names
            line[f"{second} minus {first}"] = f"{of['loss'][second] - of['loss'][first]:+.4f}"
        lines.append(line)
    return lines


def sign(names: Sequence[str]) -> str:
    """Explains the sign of a difference between two models."""
    return f"{names[1]} minus {names[0]}: where it is negative, {names[1]} is better."


def _chart(each: Mapping[str, Any], names: Sequence[str], looks: Mapping[str, Style]) -> Chart:
    """A row for each class and model."""
    marks, lines = [], []
    for of in each["classes"]:
        for name in names:
            lines.append(str(of["class"]))
            loss = of["loss"][name]
            hover = f"{{arm}}\n{of['class']}: {{x:4f}} nats per token"
            marks.append(Mark(name, [loss], [len(lines) - 1], hover=hover, bar=True, label=f"{loss:.4f}"))
    title = f"Loss by {each['kind']}"
    plot = Plot(marks, [Axis("nats per token", least=0)], [rows(lines, each["says"])], height=90 + 30 * len(lines))
    return Chart(each["kind"], title, "", [plot], looks, {name: name for name in names})


def _positions(report: Mapping[str, Any], names: Sequence[str], looks: Mapping[str, Style]) -> Chart:
    of = report["by_position"]
    at = [position for position, n in enumerate(of["targets"]) if n]
    hover = "{arm}\nposition {x:6g}: {y:4f} nats per token"
    marks = []
    for name in names:
        losses = [of["loss_sum"][name][position] / of["targets"][position] for position in at]
        marks.append(Mark(name, at, losses, hover=hover, line=1.2))
    plot = Plot(marks, [Axis("position in the row", whole=True)], [Axis("nats per token")])
    return Chart("every-position", "Loss at every position", "", [plot], looks, {name: name for name in names})


def _legend(looks: Mapping[str, Style]) -> str:
    if len(looks) == 1:
        says = f"The darker a token, the larger its loss, up to {FULL:g} nats."
    else:
        first, second = (f"<span {_colour(look.colour, FULL)}>{escape(name)}</span>" for name, look in looks.items())
        says = f"A token has the colour of the model with the smaller loss: {first} or {second}; full at {FULL:g} nats."
    return f'<p class="note">{says} A pointer on a token shows its losses.</p>'


def _row(row: Mapping[str, Any], looks: Mapping[str, Style]) -> str:
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in row["loss"].items())
    most = "".join(
        f"<li>{token['position']}: <code>{escape(_visible(token['text']))}</code>: {escape(_losses(token))}</li>"
        for token in row["most"]
    )
    text = "".join(_token(token, looks) for token in row["tokens"])
    return (
        f"<h3>Row {row['number']:,}: {escape(losses)} nats per token</h3>"
        f'<pre class="row">{text}</pre>'
        f"<details><summary>the tokens that stand out, by position</summary><ul>{most}</ul></details>"
    )


def _token(token: Mapping[str, Any], looks: Mapping[str, Style]) -> str:
    values = list(token["loss"].values())
    hue = looks[min(token["loss"], key=token["loss"].get)].colour
    size = abs(values[0] - values[1]) if len(values) == 2 else values[0]
    shown = escape(token["text"]) or "&#9633;"  # a special id has no text
    return f'<span title="{escape(_losses(token))}" {_colour(hue, size)}>{shown}</span>'


def _losses(token: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {loss:.3f}" for name, loss in token["loss"].items())


def _colour(hue: str, size: float) -> str:
    red, green, blue = (int(hue[k : k + 2], 16) for k in (1, 3, 5))
    return f'style="background:rgba({red},{green},{blue},{0.5 * min(size / FULL, 1):.2f})"'


def _visible(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\N{OPEN BOX}") or "(no text)"
