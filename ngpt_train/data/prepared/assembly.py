"""Shards out of parts that come in the order of the text, and a journal from which a killed `prepare` goes on."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngpt_train.data.dataset import STEMS
from ngpt_train.data.prepared.journal import Entry, Journal
from ngpt_train.data.prepared.parts import Counts, Part
from ngpt_train.data.prepared.shard_writer import SplitWriter

logger = logging.getLogger(__name__)


class Assembly:
    """The shards in `directory`. `position`: the unit, and how many of its documents are in them."""

    def __init__(self, directory: Path, journal: Journal, header: dict[str, Any]) -> None:
        """Goes on after the last entry of the journal, if its header is this one, else begins anew."""
        self._directory, self._journal, self._header = directory, journal, header
        self._text: bytes
        self._reset()
        entries = journal.entries() if journal.header() == header else []
        try:
            self._restore(entries)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("beginning anew: what an earlier start has left cannot be used (%s)", error)
            self.close()
            self._reset()
            entries = []
            self._restore(entries)
        self._recorded = {split: len(writer.shards) for split, writer in self._writers.items()}
        self.resumed = bool(entries)
        journal.rewrite(header, entries)

    def add(self, unit: int, part: Part) -> bool:
        """Appends the documents of a part. True if that finishes a shard, which is to be recorded."""
        for split, documents in part.splits.items():
            self._writers[split].add(documents.ids, documents.lengths, documents.sizes)
        for digest in part.digests:
            self._text = hashlib.sha256(self._text + digest).digest()
        self.counts.add(part.counts)
        self.position = (unit, part.taken)
        return any(len(writer.shards) > self._recorded[split] for split, writer in self._writers.items())

    def record(self) -> None:
        """Another start may go on from here."""
        splits = {}
        for split, writer in self._writers.items():
            splits[split] = {"open": writer.sync(), "closed": writer.shards[self._recorded[split] :]}
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

    def _reset(self) -> None:
        dtype, shard_tokens = self._header["dtype"], self._header["shard_tokens"]
        self._writers = {
            split: SplitWriter(self._directory, stem, dtype, shard_tokens) for split, stem in STEMS.items()
        }
        self.counts = Counts()
        self._text = bytes(32)
        self.position = (0, 0)

    def _restore(self, entries: Sequence[Entry]) -> None:
        closed = {split: [shard for entry in entries for shard in entry.splits[split]["closed"]] for split in STEMS}
        opened = {split: entries[-1].splits[split]["open"] if entries else None for split in STEMS}
        shards = [shard for split in STEMS for shard in [*closed[split], opened[split]] if shard is not None]
        kept = {shard[name] for shard in shards for name in ("file", "index")}
        for path in self._directory.iterdir():
            if path.suffix in (".bin", ".idx") and path.name not in kept:
                path.unlink()
        for split, writer in self._writers.items():
            writer.restore(closed[split], opened[split])
        if entries:
            self.counts = entries[-1].counts
            self._text = bytes.fromhex(entries[-1].text)
            self.position = (entries[-1].unit, entries[-1].taken)


def clear(directory: Path) -> None:
    """Empties a directory."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
