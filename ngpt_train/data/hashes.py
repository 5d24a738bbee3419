"""Checksums of files, computed once for each version of a file and remembered in the cache.

A version is (size, mtime, ctime): the kernel sets ctime on every change, and no program can set it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole
from ngpt_train.data.directory import lock

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 24
# Bytes of a file from which one process computes the checksum, and the others of the same cache wait for it.
SHARED = 1 << 24
# Bytes of a file from which a checksum takes seconds, and the log says so.
LARGE = 1 << 30
# Seconds. Within a tick of the file system's clock two versions look alike, so a file that has just changed is hashed
# again next time.
SETTLED = 2.0
MOST_REMEMBERED = 1 << 30  # bytes of hashes.json; a larger one is not read


def cache_directory(config: Config) -> Path:
    """data.cache."""
    return Path(config.data.cache).expanduser()


def canonical_hash(value: Any) -> str:
    """sha256 of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class FileHashes:
    """Remembers checksums in `hashes.json` of the cache. Checksums of small files are written by `save`.

    Raises DataError if a file cannot be read.
    """

    def __init__(self, cache: Path):
        self._path = cache / "hashes.json"
        self._changed = False
        self._known = self._stored()

    def sha256(self, path: Path) -> str:
        return self._lookup(path, None)[0]

    def tokens(self, path: Path, dtype: str) -> tuple[str, int]:
        """(sha256, largest id) of a file of token ids; the largest id of an empty file is -1."""
        sha256, largest = self._lookup(path, dtype)
        return sha256, largest

    def save(self) -> None:
        if not self._changed:
            return
        partial = self._path.with_name(f"hashes.{uuid.uuid4().hex}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with lock(self._path.with_name(".hashes.lock"), f"writing {self._path}", quiet=True):
                partial.write_text(json.dumps(self._stored() | self._known))
                os.replace(partial, self._path)
            self._changed = False
        except OSError as error:
            logger.warning("checksums are not remembered: %s: %s", self._path, error.strerror)

    def _stored(self) -> dict[str, list[Any]]:
        # Without a readable file everything is hashed again.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stored = parse_json(read_whole(self._path, MOST_REMEMBERED), MOST_REMEMBERED)
            return {name: entry for name, entry in stored.items() if _is_entry(entry)}
        return {}

    def _lookup(self, path: Path, dtype: str | None) -> list[Any]:
        try:
            return self._known_or_hashed(path, dtype)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None

    def _known_or_hashed(self, path: Path, dtype: str | None) -> list[Any]:
        name = f"{dtype or 'bytes'} {path.absolute()}"
        stat = path.stat()
        version = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        with contextlib.ExitStack() as stack:
            if not self._knows(name, version) and stat.st_size >= SHARED:
                # The ranks of a node share the cache and look up the same files at the same time.
                with contextlib.suppress(OSError):  # a cache that cannot be written
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    lock_file = self._path.with_name(f".hash-{canonical_hash(name)[:16]}.lock")
                    stack.enter_context(lock(lock_file, f"computing the checksum of {path}", quiet=True))
                if (stored := self._stored().get(name)) is not None:
                    self._known[name] = stored
            if self._knows(name, version):
                return self._known[name][1]
            if stat.st_size > LARGE:
                logger.info("computing the checksum of %s, %.1f GB", path, stat.st_size / 1e9)
            result = _hash(path, dtype)
            if time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED:
                self._known[name] = [version, result]
                self._changed = True
                if stat.st_size >= SHARED:
                    self.save()
            return result

    def _knows(self, name: str, version: list[int]) -> bool:
        return name in self._known and self._known[name][0] == version


def _is_entry(entry: Any) -> bool:
    """True for [version, [sha256, largest id]]."""
    return isinstance(entry, list) and [type(part) for part in entry] == [list, list] and len(entry[1]) == 2


def _hash(path: Path, dtype: str | None) -> list[Any]:
    digest = hashlib.sha256()
    largest = -1
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            if dtype is not None:
                largest = max(largest, int(np.frombuffer(chunk, dtype).max()))
    return [digest.hexdigest(), largest]
