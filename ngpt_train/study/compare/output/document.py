"""The report as text: report.md, and the table on the console."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ngpt_train.core.recorded import printable
from ngpt_train.report.rounded import DASH, si
from ngpt_train.study.compare.output import tables, wording
from ngpt_train.study.compare.output.series import end_losses
from ngpt_train.study.compare.output.study_tables import descents, interactions
from ngpt_train.study.compare.output.tables import Table
from ngpt_train.study.compare.output.wording import Report


def document(report: Report, figures: Mapping[str, str]) -> str:
    found, of_keys = wording.confounds(report), tables.tuning_of_keys(report)
    of_confounds = [f"{code(', '.join(keys))} {escaped(wording.confound(entry))}" for keys, entry in found]
    parts = [
        f"# {escaped(str(report['title']))}",
        escaped(" · ".join(wording.facts(report))) + ".",
        "## Verdicts",
        _table(report, tables.verdicts(report)),
        "**Confounds**, any of which may be the cause of a difference:\n\n" + _list(of_confounds)
        if found
        else wording.NO_CONFOUNDS,
        _list(map(escaped, wording.looked_at(report))),
        f"### {of_keys.title}",
        _table(report, of_keys),
        _list(f"**{escaped(sentence)}**" for sentence in wording.cautions(report)),
        *(f"![{caption}]({path})\n\n*{caption}*" for path, caption in figures.items()),
    ]
    for table in _tables(report):
        parts += [f"## {table.title}", _table(report, table)]
    if said := wording.notes(report):
        parts += ["## Notes", _list(map(escaped, said))]
    commits = ", ".join(code(str(commit)) for commit in report["commits"]) or "not known"
    commands = "\n".join(f"    {line}" for command in report["commands"] for line in command.splitlines())
    parts += ["## How to regenerate every number", f"Commit: {commits}. The loss of each run: `report.json`.", commands]
    return "\n\n".join(filter(None, parts)) + "\n"


def _tables(report: Report) -> list[Table]:
    """The tables after the figures. Speed-up lacks what Verdicts says; Tuning is of the budgets of the verdicts, and of
    those where an arm is untuned."""
    last = {(arm, si(wording.budget_of(report, arm))) for arm in report["arms"]}
    ratios, tuned = tables.speedups(report), tables.tuning(report)
    above = [row for row in ratios.rows if row[1] == wording.HOW["annealed"] and (row[0], row[2]) in last]
    others = [row for row in tuned.rows if row[3] == "bracketed" and (row[0], row[1]) not in last]
    return [
        tables.end_loss(report),
        _without(ratios, above, "of the verdicts stand above"),
        tables.differences(report),
        *interactions(report),
        _without(tuned, others, "of other budgets stand in report.html"),
        *descents(report),
        *(make(report) for make in (tables.costs, tables.referee, tables.audits, tables.failures)),
    ]


def _without(table: Table, left_out: Sequence[Sequence[str]], where: str) -> Table:
    rows = [row for row in table.rows if row not in left_out]
    return replace(table, rows=rows, note=f"{len(left_out)} rows {where}. {table.note}") if rows and left_out else table


def console(report: Report) -> str:
    """For a terminal: the title, a row for each arm and budget, and the sentences of the first page."""
    texts = [["Arm", "Tokens", "End loss", tables.minus(report)[0], "Speed-up, tokens", "Verdict"]]
    for arm in report["arms"]:
        ratios = {s["budget"]: s for s in wording.known_speedups(report, arm) if s["unit"] == "tokens"}
        word = "baseline" if arm == report["baseline"] else wording.VERDICTS.get(report["verdicts"].get(arm), DASH)
        for budget in end_losses(report, arm):
            said = word if budget == wording.budget_of(report, arm) else ""
            shown = tables.at_budget(report, arm, budget)
            texts.append([wording.label(report, arm), *shown, wording.ratio(ratios.get(budget)), said])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(x.ljust(n) for x, n in zip(line, widths, strict=True)).rstrip() for line in texts]
    found = [f"confound: {', '.join(keys)} {wording.confound(entry)}" for keys, entry in wording.confounds(report)]
    sentences = [*(found or [wording.NO_CONFOUNDS]), *wording.looked_at(report), *wording.cautions(report)]
    title = f"{report['title']}: {' · '.join(wording.facts(report))}"
    return "\n".join(map(printable, [title, "", *lines, "", *sentences, *report["notes"]]))


def escaped(text: str) -> str:
    """Escapes text for Markdown and its HTML, also inside a table."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    plain = re.sub(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain)
    # A heading, an item, a rule or a quotation at the beginning of a sentence.
    return re.sub(r"^(\d*)(?=[#.)+-]+( |$)|>)", r"\1\\", plain)


def code(text: str) -> str:
    """Text as code; escaped text instead if it has a backtick, or a bar, which ends a cell even inside code."""
    text = " ".join(text.split())
    if "`" in text or "|" in text:
        return escaped(text)
    return f"`{text}`" if text else ""


def _list(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _table(report: Report, table: Table) -> str:
    if not table.rows:
        return escaped(table.empty)
    table = table.condensed()
    names, kinds = zip(*table.columns, strict=True)
    rules = ["---:" if kind == tables.NUMBER else "---" for kind in kinds]
    rows = [[_cell(report, *cell) for cell in zip(row, kinds, strict=True)] for row in table.rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in [map(escaped, names), rules, *rows])
    return f"{text}\n\n{escaped(table.note)}" if table.note else text


def _cell(report: Report, text: str, kind: str) -> str:
    if kind == tables.ARM and text in report["arms"]:
        return escaped(wording.marked(report, text))
    return code(text) or DASH if kind == tables.CODE else escaped(text)
