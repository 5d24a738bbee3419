"""Token shards out of chunks that come in the order of the text, and a journal from which a killed `prepare` goes on.

The journal has one JSON object a line, the last one perhaps cut. The first line says what was prepared with what. Each
other is written when a shard is finished and everything before is on the disk: the position in the text, what was
counted so far, and the shards. One shard for each unit of text would need no journal; but the cuts of the text would
then decide the shards, and data.shard_tokens and the bytes of shards that users have would change.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ngpt_train.data.prepared.chunks import Chunk
from ngpt_train.data.prepared.shards import STEMS
from ngpt_train.data.prepared.writer import SplitWriter
from ngpt_train.data.sources.text import Counts

logger = logging.getLogger(__name__)

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
            for line in self._path.read_text().splitlines():
                lines.append(json.loads(line))
        except (OSError, ValueError):  # none, or a last one that was cut
            pass
        return lines


class Assembly:
    """The shards in `directory`. `position`: the unit, and how many of its documents are in them."""

    def __init__(self, directory: Path, journal: Journal, header: dict[str, Any]) -> None:
        """Goes on after the last entry of the journal, where what it lists is in the directory, else begins anew."""
        self._directory, self._journal, self._header = directory, journal, header
        self._writers: dict[str, SplitWriter] = {}
        self._text: bytes
        entries = journal.entries()
        try:
            self._restore(entries)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("beginning anew: what an earlier start has left cannot be used (%s)", error)
            self.close()
            entries = []
            self._restore(entries)
        self._recorded = {split: len(writer.shards) for split, writer in self._writers.items()}
        journal.begin(header, entries)

    def add(self, unit: int, chunk: Chunk) -> bool:
        """Appends the documents of a chunk. True if that finishes a shard, which is to be recorded."""
        for split, documents in chunk.splits.items():
            self._writers[split].add(documents.ids, documents.lengths, documents.sizes)
        for digest in chunk.digests:
            self._text = hashlib.sha256(self._text + digest).digest()
        self.counts.add(chunk.counts)
        self.position = (unit, chunk.taken)
        return any(len(writer.shards) > self._recorded[split] for split, writer in self._writers.items())

    def record(self) -> None:
        """Another start may go on from here."""
        splits = {}
        for split, writer in self._writers.items():
            splits[split] = {"open": writer.unfinished(), "closed": writer.shards[self._recorded[split] :]}
            self._recorded[split] = len(writer.shards)
        self._journal.add(Entry(*self.position, self.counts, self.text_sha256, splits))

    @property
    def text_sha256(self) -> str:
        return self._text.hex()

    @property
    def keeps_something(self) -> bool:
        """Whether another start has something to go on from."""
        return any(self._recorded.values())

    def finish(self) -> dict[str, dict[str, Any]]:
        """Closes the shards; returns the splits' part of the manifest."""
        return {split: writer.finish() for split, writer in self._writers.items()}

    def close(self) -> None:
        for writer in self._writers.values():
            writer.abandon()

    def _restore(self, entries: Sequence[Entry]) -> None:
        last = entries[-1] if entries else Entry(0, 0, Counts(), bytes(32).hex(), {})
        shards = {split: [shard for entry in entries for shard in entry.splits[split]["closed"]] for split in STEMS}
        for split, newest in last.splits.items():
            shards[split] += [newest["open"]] if newest["open"] is not None else []
        kept = {shard[name] for split in STEMS for shard in shards[split] for name in ("file", "index")}
        for path in self._directory.iterdir():
            if path.suffix in (".bin", ".idx") and path.name not in kept:
                path.unlink()
        dtype, shard_tokens = self._header["dtype"], self._header["shard_tokens"]
        for split, stem in STEMS.items():
            self._writers[split] = SplitWriter(self._directory, stem, dtype, shard_tokens, shards[split])
        self.counts, self.position = last.counts, (last.unit, last.taken)
        self._text = bytes.fromhex(last.text)


def _chained(before: str, identity: str) -> str:
    return hashlib.sha256((before + identity).encode()).hexdigest()
