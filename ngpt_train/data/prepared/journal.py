"""The journal of `prepare`: what a start that was killed has finished, so that the next one goes on after it.

One JSON object a line, the last one perhaps cut. The first line says what is prepared with what. Each other is written
when a shard is finished and everything before is on the disk: the position in the text, what was counted so far, and
the shards. One shard for each unit of text would need no journal; but the cuts of the text would then decide the
shards, and data.shard_tokens and the bytes of shards that users have would change.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ngpt_train.core.files import parse_json, read_whole
from ngpt_train.data.sources.text import Counts

JOURNAL = "journal.jsonl"


@dataclass
class Entry:
    """unit, taken: a unit and how many of its documents are done; text: the text_sha256 so far.

    splits: of each the shards that are closed since the entry before, and the one that is not.
    """

    unit: int
    taken: int
    counts: Counts
    text: str
    splits: dict[str, dict[str, Any]]


class Journal:
    """The journal in `directory` of the text with these `identities` of its units."""

    def __init__(self, directory: Path, identities: Sequence[str]) -> None:
        self._path = directory / JOURNAL
        # A unit counts as the same only if all units before it are the same, too.
        self._chain = list(itertools.accumulate(identities, _chained, initial=""))[1:]

    def header(self) -> dict[str, Any] | None:
        """What `begin` was given by an earlier start; None if there is no journal that can be read."""
        lines = self._lines()
        return lines[0] if lines else None

    def entries(self) -> list[Entry]:
        """Those about text that is the same as now, oldest first."""
        found = []
        for line in self._lines()[1:]:
            unit = line["unit"]
            if unit >= len(self._chain) or line.pop("units") != self._chain[unit]:
                break
            found.append(Entry(**{**line, "counts": Counts(**line["counts"])}))
        return found

    def begin(self, header: dict[str, Any], entries: Sequence[Entry]) -> None:
        """Keeps these entries of an earlier start alone: a line that a kill has cut is no line to go on after."""
        self._path.unlink(missing_ok=True)
        self._append(header, *map(self._line, entries))

    def add(self, entry: Entry) -> None:
        self._append(self._line(entry))

    def _line(self, entry: Entry) -> dict[str, Any]:
        return asdict(entry) | {"units": self._chain[entry.unit]}

    def _append(self, *lines: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        try:
            for line in read_whole(self._path).splitlines():
                lines.append(parse_json(line))
        except (OSError, ValueError):  # none, or a last one that was cut
            pass
        return lines


def _chained(before: str, identity: str) -> str:
    return hashlib.sha256((before + identity).encode()).hexdigest()
