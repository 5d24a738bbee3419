"""The certificate of an audit, audit.json of a run, which `compare` reads."""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import MOST_LINES_BYTES, open_file, read_json
from ngpt_train.core.recorded import COUNT, FLAG, LIST, TABLE, TEXT, all_checked, checked
from ngpt_train.study.compare.runs import Run

CERTIFICATE = "audit.json"
FORMAT = 1
KNOWN = {"equal": FLAG, "how": TEXT, "steps_compared": COUNT, "steps": COUNT}
UNKNOWN = {"commit": TEXT, "device": TEXT, "time": TEXT}  # null for a run that does not say them
NEEDED = {**KNOWN, "format": COUNT, "windows": LIST, "found": LIST, "sha256": TABLE, "time": TEXT}
WINDOW = {"start": COUNT, "end": COUNT}
METRICS = "metrics.jsonl"
SUMMED = (METRICS, "config.yaml")  # a certificate is valid as long as these files keep their checksums


@dataclass(frozen=True)
class Finding:
    """A contradiction in the files of a run. recorded, again: the two values, if there are two."""

    where: str  # metrics.jsonl, config.yaml, run.json, exit.json, data, a checkpoint, or a file in evals/
    says: str  # one sentence
    step: int | None = None
    field: str | None = None
    recorded: Any = None
    again: Any = None


def contradiction(record: Mapping[str, Any], field: str, source: str, value: Any) -> Finding:
    """The field of a record which another source contradicts."""
    kind, step, recorded = record["kind"], record["step"], record.get(field)
    says = f"the {kind} record of step {step} says {field} {recorded}, {source} {value}"
    return Finding(METRICS, says, step, field, recorded, value)


def sums_of(run: Path) -> dict[str, str]:
    """sha256 by name of the files which a certificate is about; a missing file has none."""
    found = {}
    for name in SUMMED:
        with contextlib.suppress(OSError), open_file(run / name, MOST_LINES_BYTES) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_certificates(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """`audits` of report.json, an entry for each run with a certificate. `found` counts the findings. `valid` is True
    if the records and the config are still the audited ones. An unreadable certificate is not valid."""
    return [_summary(run.path) for run in runs if (run.path / CERTIFICATE).exists()]


def _summary(run: Path) -> dict[str, Any]:
    path, names = run / CERTIFICATE, [*KNOWN, *UNKNOWN]
    try:
        stored = checked(read_json(path), NEEDED | UNKNOWN, str(path), NEEDED)
        if stored["format"] != FORMAT:
            raise DataError(f"{path} is none of this version")
        windows = all_checked(stored["windows"], WINDOW, f"{path}: windows", tuple(WINDOW))
        counts = {"windows": [[window["start"], window["end"]] for window in windows], "found": len(stored["found"])}
        valid = {"valid": stored["sha256"] == sums_of(run), "note": ""}
        return {"run": str(run), **{name: stored.get(name) for name in names}, **counts, **valid}
    except DataError as error:
        unknown: dict[str, Any] = {**dict.fromkeys(names), "equal": False, "windows": [], "found": 0, "valid": False}
        return {"run": str(run), **unknown, "note": f"{path} cannot be read: {error}"}
