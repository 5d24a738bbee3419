"""The findings, as a table for people and as JSON for an attachment."""

import textwrap
import time
from collections.abc import Sequence
from typing import Any

import ngpt_train
from ngpt_train.core.secrets import redacted
from ngpt_train.doctor.examination import Examination
from ngpt_train.doctor.findings import OK, VERDICTS, WARNING, WRONG, Finding, in_words

FORMAT = 1
WIDTH, CHECK, VERDICT = 120, 20, 8


def as_json(examination: Examination, findings: Sequence[Finding], code: int) -> dict[str, Any]:
    """The report, with secrets redacted. docs/doctor.md explains the fields."""
    return redacted(
        {
            "format": FORMAT,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ngpt_train": ngpt_train.__version__,
            "verdict": max((finding.verdict for finding in findings), key=VERDICTS.index),
            "exit_code": code,
            "seconds": round(examination.seconds, 1),
            "findings": [
                {
                    "check": finding.check,
                    "verdict": finding.verdict,
                    "where": in_words(finding.where, examination.places) or "all",
                    "ranks": [place.rank for place in finding.where or examination.places],
                    "found": finding.found,
                    "mend": "" if finding.verdict == OK else finding.remedy,
                    "checked": finding.checked,
                }
                for finding in findings
            ],
            "ranks": [vars(place) for place in examination.places],
            "facts": {
                look: [
                    {"rank": a.place.rank, "seconds": round(a.seconds, 2), "problem": a.problem, **a.facts}
                    for a in answers
                ]
                for look, answers in examination.answers.items()
            },
        }
    )


def as_text(report: dict[str, Any]) -> str:
    """The table (check, verdict, places, findings, remedies), then a summary in one line."""
    lines = [f"{'check':<{CHECK}} {'verdict':<{VERDICT}} found, and how to mend it"]
    before = ""
    for row in report["findings"]:
        where = "" if row["where"] == "all" else f"{row['where']}: "
        name = row["check"] if row["check"] != before else ""
        before = row["check"]
        lines += _cell(f"{name:<{CHECK}} {row['verdict']:<{VERDICT}} ", f"{where}{row['found']}")
        if row["mend"]:
            lines += _cell(" " * (CHECK + VERDICT + 2), f"mend: {row['mend']}")
    counts = {verdict: sum(row["verdict"] == verdict for row in report["findings"]) for verdict in (WRONG, WARNING)}
    told = f"{counts[WRONG]} wrong, {counts[WARNING]} warning{'s' if counts[WARNING] != 1 else ''}"
    would = "would not work here" if counts[WRONG] else "would work here"
    return "\n".join([*lines, "", f"A run {would}: {told}; looked for {report['seconds']:.0f} s"])


def _cell(begin: str, text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * (CHECK + VERDICT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
