"""How the shards of a split are written, and how writing goes on after a kill. docs/data.md documents the files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 24


def dtype_for(vocab_size: int) -> str:
    """Little-endian type of the stored ids."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class SplitWriter:
    """Writes documents into `<stem>-00000.bin`, `<stem>-00000.idx`, ...

    A shard ends with the document that brings it to `shard_tokens`, so every document is whole. Nothing of a shard is
    held in memory. Shards that are closed are on the disk.
    """

    def __init__(self, directory: Path, stem: str, dtype: str, shard_tokens: int):
        self._directory, self._stem = directory, stem
        self._dtype = np.dtype(dtype)
        self._shard_tokens = shard_tokens
        self._split_hash = hashlib.sha256()
        self._open: _OpenShard | None = None
        self.shards: list[dict[str, Any]] = []
        """What the manifest says of the closed shards."""

    def add(self, ids: NDArray[np.integer], lengths: NDArray[np.integer], sizes: NDArray[np.integer]) -> None:
        """Appends documents, one after the other in `ids`, each with eos at its end.

        lengths, sizes: of each document, its ids and the bytes of its text.
        """
        ids = np.ascontiguousarray(ids, self._dtype)
        ends = np.cumsum(lengths, dtype=np.int64)
        assert len(ids) == (ends[-1] if len(ends) else 0)
        first = start = 0
        while first < len(ends):
            if self._open is None:
                self._open = _OpenShard(self._directory / f"{self._stem}-{len(self.shards):05d}.bin")
            shard = self._open
            last = int(np.searchsorted(ends, start + self._shard_tokens - shard.tokens))
            after = min(last + 1, len(ends))
            end = int(ends[after - 1])
            data = ids[start:end].tobytes()
            self._split_hash.update(data)
            shard.add(data, ends[first:after] - start, int(sizes[first:after].sum()))
            first, start = after, end
            if shard.tokens >= self._shard_tokens:
                self._close()

    def sync(self) -> dict[str, Any] | None:
        """Waits until everything is on the disk; returns what `restore` needs of the shard that is not closed."""
        if self._open is None:
            return None
        self._open.sync()
        return self._open.entry()

    def restore(self, shards: list[dict[str, Any]], opened: dict[str, Any] | None) -> None:
        """Goes on after these shards and the first tokens of the next one, which lie in the directory.

        Raises ValueError or OSError where they are not what was written.
        """
        for shard in shards:
            path, index = self._directory / shard["file"], self._directory / shard["index"]
            found = _digest(path, shard["tokens"] * self._dtype.itemsize, hashlib.sha256(), self._split_hash)
            found_index = _digest(index, (shard["documents"] + 1) * 8, hashlib.sha256())
            if (found, found_index) != (shard["sha256"], shard["index_sha256"]):
                raise ValueError(f"{path} has changed")
        self.shards = shards
        if opened is not None:
            size = opened["tokens"] * self._dtype.itemsize
            self._open = _OpenShard(self._directory / opened["file"], opened, size, self._split_hash)

    def finish(self) -> dict[str, Any]:
        """Closes the last shard; returns the split's part of the manifest."""
        if self._open is not None:
            self._close()
        totals = {name: sum(shard[name] for shard in self.shards) for name in ("tokens", "documents", "bytes")}
        return {**totals, "sha256": self._split_hash.hexdigest(), "shards": self.shards}

    def abandon(self) -> None:
        """Closes the files of an unfinished split."""
        if self._open is not None:
            self._open.close()

    def _close(self) -> None:
        assert self._open is not None
        self._open.sync()
        self._open.close()
        self.shards.append(self._open.entry())
        self._open = None


class _OpenShard:
    """The shard that is written to. `so_far`: what is kept of its files, if it is one from before."""

    def __init__(self, path: Path, so_far: dict[str, Any] | None = None, size: int = 0, split_hash: Any = None) -> None:
        self.path, self.index = path, path.with_suffix(".idx")
        self.tokens = self.documents = self.bytes = 0
        self._hash, self._index_hash = hashlib.sha256(), hashlib.sha256()
        if so_far is not None:
            self.tokens, self.documents, self.bytes = so_far["tokens"], so_far["documents"], so_far["bytes"]
            _cut(path, size)
            _cut(self.index, (self.documents + 1) * 8)
            found = _digest(path, size, self._hash, split_hash)
            found_index = _digest(self.index, (self.documents + 1) * 8, self._index_hash)
            if (found, found_index) != (so_far["sha256"], so_far["index_sha256"]):
                raise ValueError(f"{path} has changed")
        mode = "wb" if so_far is None else "ab"
        self._files = (path.open(mode), self.index.open(mode))
        if so_far is None:
            self._write_index(np.zeros(1, np.int64))

    def add(self, data: bytes, ends: NDArray[np.int64], n_bytes: int) -> None:
        self._files[0].write(data)
        self._hash.update(data)
        self._write_index(ends + self.tokens)
        self.tokens += int(ends[-1])
        self.documents += len(ends)
        self.bytes += n_bytes

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

    def _write_index(self, offsets: NDArray[np.int64]) -> None:
        data = offsets.astype("<u8").tobytes()
        self._files[1].write(data)
        self._index_hash.update(data)


def _cut(path: Path, size: int) -> None:
    if path.stat().st_size > size:  # what was written after the last entry of the journal
        os.truncate(path, size)


def _digest(path: Path, size: int, *digests: Any) -> str:
    """Feeds the file to all digests; returns what the first then is. Raises ValueError for another size."""
    if (found := path.stat().st_size) != size:
        raise ValueError(f"{path} has {found} bytes, not {size}")
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            for digest in digests:
                digest.update(chunk)
    return digests[0].hexdigest()
