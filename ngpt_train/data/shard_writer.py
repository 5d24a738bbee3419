"""Writes token shards, and goes on after a kill. docs/data.md documents the files.

A journal says what is on the disk. One shard for each unit of text would need none, but then the cuts into units would
decide the shards, and data.shard_tokens and the shards of today's users would change.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.core.files import parse_json, read_whole
from ngpt_train.data.cache_files import READ_BYTES
from ngpt_train.data.chunks import STEMS, Chunk, Document
from ngpt_train.data.sources.source import Counts

logger = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"


def dtype_for(vocab_size: int) -> str:
    """The little-endian type of the stored ids."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class ShardWriter:
    """Writes chunks into the shards of both splits, and finished shards into the journal.
    position: (unit, number of its documents in the shards)."""

    def __init__(self, directory: Path, journal: Journal, header: dict[str, Any]) -> None:
        """Goes on after the last entry of the journal if its shards are intact, else begins anew."""
        self._directory, self._journal, self._header = directory, journal, header
        self._writers: dict[str, SplitWriter] = {}
        self._text: bytes
        entries: list[dict[str, Any]] = []
        try:
            entries = journal.entries()
            self._restore(entries)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("beginning anew: the shards of an earlier start cannot be used (%s)", error)
            self.close()
            entries = []
            self._restore(entries)
        self._recorded = {split: len(writer.shards) for split, writer in self._writers.items()}
        journal.begin(header, entries)

    def add(self, unit: int, chunk: Chunk) -> bool:
        """Appends the documents of a chunk. True if that finishes a shard, which calls for `record`."""
        for split, documents in chunk.documents.items():
            self._writers[split].add(documents)
        for digest in chunk.digests:
            self._text = hashlib.sha256(self._text + digest).digest()
        self.counts.add(chunk.counts)
        self.position = (unit, chunk.taken)
        return any(len(writer.shards) > self._recorded[split] for split, writer in self._writers.items())

    def record(self) -> None:
        """Writes an entry, after which another start may go on."""
        splits = {}
        for split, writer in self._writers.items():
            splits[split] = {"open": writer.unfinished(), "closed": writer.shards[self._recorded[split] :]}
            self._recorded[split] = len(writer.shards)
        unit, taken = self.position
        self._journal.add(
            {"unit": unit, "taken": taken, "counts": asdict(self.counts), "text": self.text_sha256, "splits": splits}
        )

    @property
    def text_sha256(self) -> str:
        return self._text.hex()

    @property
    def keeps_something(self) -> bool:
        """True if another start can go on after a finished shard."""
        return any(self._recorded.values())

    def finish(self) -> dict[str, dict[str, Any]]:
        """Closes the shards. Returns the manifest's entries of the splits."""
        return {split: writer.finish() for split, writer in self._writers.items()}

    def close(self) -> None:
        for writer in self._writers.values():
            writer.abandon()

    def _restore(self, entries: Sequence[dict[str, Any]]) -> None:
        nothing: dict[str, Any] = {"unit": 0, "taken": 0, "counts": {}, "text": bytes(32).hex(), "splits": {}}
        last = entries[-1] if entries else nothing
        shards = {split: [shard for entry in entries for shard in entry["splits"][split]["closed"]] for split in STEMS}
        for split, newest in last["splits"].items():
            shards[split] += [newest["open"]] if newest["open"] is not None else []
        kept = {shard[name] for split in STEMS for shard in shards[split] for name in ("file", "index")}
        for path in self._directory.iterdir():
            if path.suffix in (".bin", ".idx") and path.name not in kept:
                path.unlink()
        dtype, shard_tokens = self._header["dtype"], self._header["shard_tokens"]
        for split, stem in STEMS.items():
            self._writers[split] = SplitWriter(self._directory, stem, dtype, shard_tokens, shards[split])
        self.counts, self.position = Counts(**last["counts"]), (last["unit"], last["taken"])
        self._text = bytes.fromhex(last["text"])


class SplitWriter:
    """Writes documents into `<stem>-00000.bin`, `<stem>-00000.idx`, ... A shard ends with the document that brings it
    to `shard_tokens`, so no document is cut. Closed shards are synced to the disk."""

    def __init__(
        self, directory: Path, stem: str, dtype: str, shard_tokens: int, before: Sequence[dict[str, Any]] = ()
    ) -> None:
        """before: entries of earlier shards to go on after. The last shard may be unfinished. Raises ValueError or
        OSError if their files have changed."""
        self._directory, self._stem = directory, stem
        self._dtype = np.dtype(dtype)
        self._shard_tokens = shard_tokens
        self._split_hash = hashlib.sha256()
        self._open: _OpenShard | None = None
        self.shards: list[dict[str, Any]] = []  # the manifest's entries of closed shards
        for entry in before:
            self._open = _OpenShard(directory / entry["file"], self._dtype.itemsize, entry, self._split_hash)
            if self._open.tokens >= shard_tokens:
                self._close()

    def add(self, documents: Iterable[Document]) -> None:
        for ids, n_bytes in documents:
            if self._open is None:
                path = self._directory / f"{self._stem}-{len(self.shards):05d}.bin"
                self._open = _OpenShard(path, self._dtype.itemsize)
            data = ids.astype(self._dtype).tobytes()
            self._split_hash.update(data)
            self._open.add(data, len(ids), n_bytes)
            if self._open.tokens >= self._shard_tokens:
                self._close()

    def unfinished(self) -> dict[str, Any] | None:
        """Syncs the open shard and returns its entry; None if no shard is open."""
        if self._open is None:
            return None
        self._open.sync()
        return self._open.entry()

    def finish(self) -> dict[str, Any]:
        """Closes the last shard. Returns the manifest's entry of the split."""
        if self._open is not None:
            self._close()
        totals = {name: sum(shard[name] for shard in self.shards) for name in ("tokens", "documents", "bytes")}
        return {**totals, "sha256": self._split_hash.hexdigest(), "shards": self.shards}

    def abandon(self) -> None:
        if self._open is not None:
            self._open.close()

    def _close(self) -> None:
        assert self._open is not None
        self._open.sync()
        self._open.close()
        self.shards.append(self._open.entry())
        self._open = None


class _OpenShard:
    """A shard that grows."""

    def __init__(self, path: Path, itemsize: int, before: dict[str, Any] | None = None, split_hash: Any = None) -> None:
        """before: the `entry` of a shard to go on with. Later bytes of its files are cut off, the others are hashed
        again, also into `split_hash`."""
        self.path, self.index = path, path.with_suffix(".idx")
        self.tokens = self.documents = self.bytes = 0
        self._hash, self._index_hash = hashlib.sha256(), hashlib.sha256()
        if before is not None:
            self.tokens, self.documents, self.bytes = before["tokens"], before["documents"], before["bytes"]
            _read_again(path, self.tokens * itemsize, self._hash, split_hash)
            _read_again(self.index, (self.documents + 1) * 8, self._index_hash)
            if self.entry() != before:
                raise ValueError(f"{path} has changed")
        mode = "wb" if before is None else "ab"
        self._files = (path.open(mode), self.index.open(mode))
        if before is None:
            self._write_offset()

    def add(self, data: bytes, n_tokens: int, n_bytes: int) -> None:
        """Appends a document. data: its ids; n_bytes: the bytes of its text."""
        self._files[0].write(data)
        self._hash.update(data)
        self.tokens += n_tokens
        self.documents += 1
        self.bytes += n_bytes
        self._write_offset()

    def sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files:
            file.close()

    def entry(self) -> dict[str, Any]:
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "sha256": self._hash.hexdigest(),
            "index": self.index.name,
            "index_sha256": self._index_hash.hexdigest(),
        }

    def _write_offset(self) -> None:
        """Appends the end of the last document to the index; of an empty shard, the start of the first."""
        data = self.tokens.to_bytes(8, "little")
        self._files[1].write(data)
        self._index_hash.update(data)


def _read_again(path: Path, size: int, *digests: Any) -> None:
    """Cuts the file off after `size` bytes and hashes them. Raises ValueError if it has fewer."""
    if (found := path.stat().st_size) < size:
        raise ValueError(f"{path} has {found} bytes, not {size}")
    os.truncate(path, size)
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            for digest in digests:
                digest.update(chunk)


class Journal:
    """The journal in `directory`: a JSON object a line. A kill may cut the last one. identities: of the text's units.

    The first line holds the settings. Each other is an entry, written when a shard is finished and everything before it
    is on the disk. It has "unit" and "taken", the position in the text; "counts" and "text", the counts and text_sha256
    so far; "splits", of each split the shards "closed" since the last entry and the "open" one; "units", a hash of the
    units.
    """

    def __init__(self, directory: Path, identities: Sequence[str]) -> None:
        self._path = directory / JOURNAL

        # A unit is unchanged only if all units before it are, too.
        def chained(before: str, identity: str) -> str:
            return hashlib.sha256((before + identity).encode()).hexdigest()

        self._chain = list(itertools.accumulate(identities, chained, initial=""))[1:]

    def header(self) -> dict[str, Any] | None:
        """The first line of an earlier start (`begin`); None without a readable journal."""
        lines = self._lines()
        return lines[0] if lines else None

    def entries(self) -> list[dict[str, Any]]:
        """The entries of unchanged text, oldest first."""
        found = []
        for entry in self._lines()[1:]:
            unit = entry["unit"]
            if unit >= len(self._chain) or entry["units"] != self._chain[unit]:
                break
            found.append(entry)
        return found

    def begin(self, header: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
        """Writes the journal anew with these entries of an earlier start. So a line cut by a kill is gone."""
        self._path.unlink(missing_ok=True)
        self._append(header, *entries)

    def add(self, entry: dict[str, Any]) -> None:
        """Writes an entry; "units" is filled in."""
        self._append(entry | {"units": self._chain[entry["unit"]]})

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
        except (OSError, ValueError):  # no journal, or a cut last line
            pass
        return lines
