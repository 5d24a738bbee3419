"""What an audit has found, as the file audit.json of a run, which `compare` reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json
from ngpt_train.study.compare.runs import Run

CERTIFICATE = "audit.json"
FORMAT = 1
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
    """sha256 of the files that a certificate is about, as they are now."""
    paths = {name: run / name for name in SUMMED}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()}


def read_certificates(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """What the certificates of these runs say, for those that have one: `run`, `equal`, `how`, `steps_compared`,
    `steps`, `windows`, `found` (how many), `commit`, `device`, `time`, and `valid`: whether it is of the records and
    the config that are there now. A certificate that cannot be read is not valid."""
    return [_summary(run.path) for run in runs if (run.path / CERTIFICATE).exists()]


def _summary(run: Path) -> dict[str, Any]:
    try:
        stored = read_json(run / CERTIFICATE)
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise DataError(f"{run / CERTIFICATE} is none of this version")
        names = ("equal", "how", "steps_compared", "steps", "commit", "device", "time")
        found = {name: stored[name] for name in names}
        windows = [[window["start"], window["end"]] for window in stored["windows"]]
        counts = {"windows": windows, "found": len(stored["found"])}
        return {"run": str(run), **found, **counts, "valid": stored["sha256"] == sums_of(run), "note": ""}
    except (DataError, KeyError, TypeError, OSError) as error:
        unknown = dict.fromkeys(("how", "steps_compared", "steps", "commit", "device", "time"))
        problem = f"{run / CERTIFICATE} cannot be read: {error}"
        return {"run": str(run), "equal": False, **unknown, "windows": [], "found": 0, "valid": False, "note": problem}
