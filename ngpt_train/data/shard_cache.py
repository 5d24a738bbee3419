"""A cache of decoded shards on this machine. One process fetches and decodes a shard, and all read its documents by
number. The disk space of the cache is bounded.

A decoded shard is a directory:
text.bin    the UTF-8 text of all documents, one after the other
ends.bin    the end of each document in text.bin, <u8
places.bin  the place of each document in [0, 1), <f8; documents below data.val_fraction are held out
header.json the number of documents, the bytes, the sha256 of these three files and of the source's files, and the
            problem of a skipped shard
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole, remove
from ngpt_train.data.cache_files import FileHashes, build_directory, canonical_hash
from ngpt_train.data.dataset import StoredNumbers
from ngpt_train.data.sources.source import FetchError, Shard, ShardSource, place_of
from ngpt_train.data.tokenizers.tokenizer import Ints

logger = logging.getLogger(__name__)

HEADER = "header.json"
CHECKED = ("text.bin", "ends.bin", "places.bin")
MOST_ATTEMPTS = 5  # to decode a shard whose copy is damaged or deleted each time
# Seconds. A shard that was opened within them is not deleted, because another process may be about to read it.
RECENT = 60.0


class ShardCache:
    """Decoded shards in `directory`, at most `limit` bytes. The least recently opened shard is deleted first."""

    def __init__(self, directory: Path, limit: float, source: ShardSource, text_field: str, skip_bad: bool) -> None:
        self._directory, self._limit, self._source = directory, limit, source
        self._text_field, self._skip_bad = text_field, skip_bad

    def open(self, shard: Shard) -> Documents:
        """The documents of a shard. Fetches and decodes it unless it is here. Raises FetchError if it cannot be
        reached, DataError if it is faulty and bad shards are not skipped, or if the disk is full."""
        target = self._place(shard)
        for _ in range(MOST_ATTEMPTS):
            if not (target / HEADER).exists():
                self._build(target, shard)
            try:
                os.utime(target / HEADER)  # last use
                documents = Documents(target)
                if documents.header.get("files", []) != list(shard.checksums):
                    raise ValueError("nothing says that it is of these files")  # a copy of an earlier version
                if documents.header["bad"] is None or self._skip_bad:
                    self._check(target, documents)
                    return documents
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s: the decoded copy in %s is damaged (%s) and made again", shard.name, target, error)
            _remove(target)
        raise DataError(f"{shard.name}: the decoded copy in {target} is damaged again and again; is the disk faulty?")

    def bytes_if_here(self, shard: Shard) -> int | None:
        """Bytes of text of a decoded shard; None if it is not decoded. Fetches nothing."""
        try:
            return int(read_header(self._place(shard))["bytes"])
        except (OSError, ValueError, KeyError, TypeError):  # absent or damaged, which `open` reports
            return None

    def _place(self, shard: Shard) -> Path:
        return self._directory / canonical_hash([shard.identity, self._text_field])[:32]

    def _check(self, target: Path, documents: Documents) -> None:
        """Raises ValueError if a file has changed. The checksums are computed once for each version of a file."""
        hashes = FileHashes(self._directory)
        for name in CHECKED:
            if hashes.sha256(target / name) != documents.header["sha256"][name]:
                raise ValueError(f"{name} has another sha256 than when it was written")
        hashes.save()

    def _build(self, target: Path, shard: Shard) -> None:
        self._make_room(keep=target)

        def build(directory: Path) -> None:
            scratch = directory / "fetched"
            scratch.mkdir()
            before = self._versions(shard)
            try:
                write_documents(directory, self._source.documents(shard, scratch), shard.checksums)
            except FetchError:
                raise
            except DataError as error:
                if not self._skip_bad:
                    raise
                write_documents(directory, (), shard.checksums, problem=str(error))
            if self._versions(shard) != before:
                raise _changed(shard.name)
            shutil.rmtree(scratch)

        try:
            build_directory(target, build)
        except DataError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
                raise
            self._make_room(keep=target, everything=True)
            build_directory(target, build)

    def _versions(self, shard: Shard) -> list[tuple[int, int, int]]:
        """Size and times of a shard's files. A change during the decoding changes them. Raises FetchError if a file has
        changed since the run listed it: its text would get the identity of the old one."""
        if not shard.checksums:
            return []
        hashes, found = FileHashes(self._directory.parent), []
        for path, sha256 in zip(map(Path, shard.files), shard.checksums, strict=True):
            try:
                found_sha256 = hashes.sha256(path)
            except DataError as error:  # the file is away, and its content may be good
                raise FetchError(str(error)) from None
            if found_sha256 != sha256:
                raise _changed(str(path))
            stat = path.stat()
            found.append((stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        hashes.save()
        return found

    def _make_room(self, keep: Path, everything: bool = False) -> None:
        """Deletes the least recently opened shards until the rest is below the limit. Recent shards stay.
        everything: True deletes all shards but `keep`."""
        found = []
        for header in self._directory.glob(f"*/{HEADER}"):
            if header.parent.name.startswith("."):  # a process is making it
                continue
            with contextlib.suppress(OSError):  # another process may delete it
                n_bytes = sum(file.stat().st_size for file in header.parent.iterdir())
                found.append((header.stat().st_mtime, header.parent, n_bytes))
        size = sum(entry[2] for entry in found)
        for opened, directory, n_bytes in sorted(found):
            unneeded = size > self._limit and time.time() - opened > RECENT
            if directory == keep or not (unneeded or everything):
                continue
            logger.info("deleting %s, the decoded shard that was opened longest ago", directory)
            _remove(directory)
            size -= n_bytes


def _changed(name: str) -> FetchError:
    return FetchError(
        f"{name}: its text has changed since the run has listed it. Restore it, and the same command goes on; or start "
        "another run.name"
    )


def _remove(directory: Path) -> None:
    """Processes with open files keep them. A process that opens the shard later makes it again."""
    with contextlib.suppress(OSError):
        if not directory.is_symlink():  # the files behind a link are not ours
            (directory / HEADER).unlink()
    with contextlib.suppress(OSError):
        remove(directory)


class OpenShards:
    """The documents of a list of shards. A shard is opened when a stream comes to it."""

    # Two windows, because streams do not enter the next window at the same moment.
    WINDOWS_OPEN = 2

    def __init__(
        self, cache: ShardCache, shards: Sequence[Shard], val_fraction: float, open_shards: int, skipped: dict[str, str]
    ) -> None:
        """skipped: the problems of shards that an earlier start left out, by name. They stay left out."""
        self.skipped = dict(skipped)
        self.n_shards, self.val_fraction = len(shards), val_fraction
        self._cache, self.shards = cache, shards
        # documents(shard): all documents of a shard, held-out documents included.
        self.documents = functools.lru_cache(self.WINDOWS_OPEN * open_shards + 1)(lambda n: cache.open(shards[n]))
        self._sizes: dict[int, int] = {}
        self._announced: set[tuple[int, ...]] = set()

    def n_documents(self, shard: int) -> int:
        """Documents of a shard, held-out documents included. 0 for a skipped shard."""
        name = self.shards[shard].name
        if name in self.skipped:
            return 0
        if shard not in self._sizes:
            documents = self.documents(shard)
            if problem := documents.header["bad"]:
                self.skipped[name] = problem
            self._sizes[shard] = len(documents)
        return self._sizes[shard]

    def document(self, shard: int, index: int) -> str | None:
        """A training document; None if the document is held out."""
        documents = self.documents(shard)
        if documents.header["bad"] is not None:
            name = self.shards[shard].name
            raise DataError(f"{name} was read before and is faulty now: {documents.header['bad']}")
        is_held_out = documents.places[index : index + 1][0] < self.val_fraction
        return None if is_held_out else documents.text(index)

    def held_out(self, shard: int) -> Iterator[str]:
        documents = self.documents(shard)
        for index in np.flatnonzero(documents.places[:] < self.val_fraction).tolist():
            yield documents.text(index)

    def training_bytes(self, shard: int) -> Ints:
        """Bytes of the training documents among the first 0, 1, 2, ... documents of a shard."""
        documents = self.documents(shard)
        return np.append(0, np.where(documents.places[:] < self.val_fraction, 0, documents.sizes()).cumsum())

    def soon(self, shards: Sequence[int]) -> None:
        """Fetches and decodes shards in the background. An error there comes again when a stream needs the shard."""
        if tuple(shards) in self._announced:
            return
        self._announced.add(tuple(shards))

        def fetch() -> None:
            with contextlib.suppress(Exception):
                for shard in shards:
                    self._cache.open(self.shards[shard])

        threading.Thread(target=fetch, name="next shards", daemon=True).start()


def write_documents(directory: Path, texts: Iterable[str], files: Sequence[str], problem: str | None = None) -> None:
    """Writes the documents in their order, without empty ones. One document is in memory at a time.
    files: `Shard.checksums`. problem: of a skipped shard, which has no documents."""
    ends, places, n_empty, size = [], [], 0, 0
    digest = hashlib.sha256()
    with (directory / "text.bin").open("wb") as file:
        for text in texts:
            if not text:
                n_empty += 1
                continue
            data = text.encode()
            file.write(data)
            digest.update(data)
            size += len(data)
            ends.append(size)
            places.append(place_of(data))
    sha256 = {"text.bin": digest.hexdigest()}
    for name, numbers in (("ends.bin", np.array(ends, "<u8")), ("places.bin", np.array(places, "<f8"))):
        data = numbers.tobytes()
        # Not tofile, which reports no full disk.
        (directory / name).write_bytes(data)
        sha256[name] = hashlib.sha256(data).hexdigest()
    header = {
        "documents": len(ends),
        "bytes": size,
        "empty": n_empty,
        "sha256": sha256,
        "bad": problem,
        "files": list(files),
    }
    (directory / HEADER).write_text(json.dumps(header) + "\n")


def read_header(directory: Path) -> dict[str, Any]:
    return parse_json(read_whole(directory / HEADER))


class Documents:
    """Reads the files of `write_documents`. Raises ValueError or OSError if they do not fit the header."""

    def __init__(self, directory: Path) -> None:
        self.header = read_header(directory)
        n = self.header["documents"]
        for name, expected in (("text.bin", self.header["bytes"]), ("ends.bin", 8 * n), ("places.bin", 8 * n)):
            if (found := (directory / name).stat().st_size) != expected:
                raise ValueError(f"{name} has {found} bytes, not {expected}")
        self._text = StoredNumbers(directory / "text.bin", "u1")
        self._ends = StoredNumbers(directory / "ends.bin", "<u8")
        self.places = StoredNumbers(directory / "places.bin", "<f8")  # of all documents, in [0, 1)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        return map(self.text, range(len(self)))

    def sizes(self) -> Ints:
        """Bytes of each document."""
        ends = np.append(0, self._ends[:]).astype(np.int64)
        return ends[1:] - ends[:-1]

    def text(self, index: int) -> str:
        ends = self._ends[max(0, index - 1) : index + 1].tolist()
        return self._text[ends[0] if index else 0 : ends[-1]].tobytes().decode()
