"""`doctor`: would a training run work here? In about a minute, alone or under torchrun."""

import os
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ngpt_train
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.core.launcher import end_with_launcher
from ngpt_train.core.secrets import redacted
from ngpt_train.doctor.bounded import first_line
from ngpt_train.doctor.examination import LAST_SECONDS, Examination, examine, exit_code, judge
from ngpt_train.doctor.findings import MACHINE, OK, VERDICTS, WARNING, WRONG, Finding, in_words
from ngpt_train.doctor.rank_store import absent, connection, here, tell, told

STORE_SECONDS = 45.0  # for Python to start on other hosts
VERDICT_SECONDS = 60.0  # by which rank 0 may end later than another rank
FORMAT = 1
WIDTH, CHECK, VERDICT = 120, 20, 8


def main(config: Config, overrides: Sequence[str]) -> int:
    """Rank 0 prints the table, and writes it to doctor.out as JSON. Returns on every rank 0 if a run would work, else 2
    or 3, as `train` would. Raises DataError where the store of torchrun cannot be reached."""
    end_with_launcher()
    place = here()
    try:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = connection(place, STORE_SECONDS, holds_store=place.rank == 0 and not by_torchrun)
        if place.rank == 0:
            print(f"looking at {place.size} rank{'s' if place.size > 1 else ''}, for a minute or so", file=sys.stderr)
        examination = examine(config, place, store)
        if examination is None:
            code = int(told(store, "verdict", [0], VERDICT_SECONDS).get(0, MACHINE))
        else:
            findings = judge(config, examination)
            code = exit_code(findings)
            report = as_json(examination, findings, code)
            print(as_text(report), flush=True)
            if config.doctor.out is not None:
                out = Path(config.doctor.out).expanduser()
                write_json(out, report)
                print(f"written to {out}")
            tell(store, place, "verdict", code)
        # The store may live in this process. torchrun ends all ranks as soon as one has failed; each is to end with its
        # own exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        absent(store, place, "end", LAST_SECONDS)
        return code
    except RuntimeError as error:  # of torch's store
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DataError(
            f"rank {place.rank} on {place.host} does not reach the other ranks by way of {address} "
            f"({first_line(error)}). Open that port on the host of rank 0, and check MASTER_ADDR and --rdzv-endpoint"
        ) from None


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
