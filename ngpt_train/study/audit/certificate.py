"""The certificate of an audit: the file audit.json of a run, which `compare` reads."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import MOST_LINES_BYTES, open_file, read_json
from ngpt_train.core.recorded import COUNT, FLAG, LIST, TABLE, TEXT, all_checked, checked
from ngpt_train.study.compare.runs import Run

CERTIFICATE = "audit.json"
FORMAT = 1
FIELDS = {"format": COUNT, "equal": FLAG, "how": TEXT, "steps_compared": COUNT, "steps": COUNT, "windows": LIST}
FIELDS |= {"found": LIST, "sha256": TABLE, "commit": TEXT, "device": TEXT, "time": TEXT}
UNKNOWN = {"commit", "device"}  # which not every run says
WINDOW = {"start": COUNT, "end": COUNT}
SUMMED = ("metrics.jsonl", "config.yaml")  # the files whose checksums say whether a certificate is of these records


@dataclass(frozen=True)
class Finding:
    """Something about a run that cannot be true. recorded, again: the values that differ, where there are such."""

    where: str  # metrics.jsonl, config.yaml, run.json, data, a checkpoint, a file in evals/
    says: str  # one sentence
    step: int | None = None
    field: str | None = None
    recorded: Any = None
    again: Any = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sums_of(run: Path) -> dict[str, str]:
    """sha256 of the files that a certificate is about, as they are now, of those that are there."""
    found = {}
    for name in SUMMED:
        with contextlib.suppress(OSError), open_file(run / name, MOST_LINES_BYTES) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_certificates(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The certificates of these runs, where they have one: `run`, `equal`, `how`, `steps_compared`,
    `steps`, `windows`, `found` (how many), `commit`, `device`, `time`, and `valid`: whether it is of the records and
    the config that are there now. A certificate that cannot be read is not valid."""
    return [_summary(run.path) for run in runs if (run.path / CERTIFICATE).exists()]


def _summary(run: Path) -> dict[str, Any]:
    try:
        stored = checked(read_json(run / CERTIFICATE), FIELDS, str(run / CERTIFICATE), FIELDS.keys() - UNKNOWN)
        if stored["format"] != FORMAT:
            raise DataError(f"{run / CERTIFICATE} is none of this version")
        names = ("equal", "how", "steps_compared", "steps", "commit", "device", "time")
        found = {name: stored.get(name) for name in names}
        windows = all_checked(stored["windows"], WINDOW, f"{run / CERTIFICATE}: windows", tuple(WINDOW))
        counts = {"windows": [[window["start"], window["end"]] for window in windows], "found": len(stored["found"])}
        return {"run": str(run), **found, **counts, "valid": stored["sha256"] == sums_of(run), "note": ""}
    except DataError as error:
        unknown = dict.fromkeys(("how", "steps_compared", "steps", "commit", "device", "time"))
        problem = f"{run / CERTIFICATE} cannot be read: {error}"
        return {"run": str(run), "equal": False, **unknown, "windows": [], "found": 0, "valid": False, "note": problem}
