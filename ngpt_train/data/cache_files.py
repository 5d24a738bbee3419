"""Files that several processes share: checksums, and directories that are complete as soon as they exist.

A checksum is computed once for each version of a file and remembered in the cache. A version is (size, mtime, ctime):
the kernel sets ctime on every change, and no program can set it back. One process at a time builds a directory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import parse_json, read_whole, remove, sync

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
    return Path(config.data.cache).expanduser()


def canonical_hash(value: Any) -> str:
    """sha256 of a JSON value, the same for equal values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class FileHashes:
    """Remembers checksums in `hashes.json` of the cache. Checksums of small files are written by `save`. Raises
    DataError if a file cannot be read."""

    def __init__(self, cache: Path):
        self._path = cache / "hashes.json"
        self._changed = False
        self._known = self._stored()

    def sha256(self, path: Path) -> str:
        return self.tokens(path, None)[0]

    def tokens(self, path: Path, dtype: str | None) -> tuple[str, int]:
        """(sha256, largest id) of a file of token ids; -1 without ids, or without their dtype."""
        try:
            sha256, largest = self._known_or_hashed(path, dtype)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
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


# --- directories


def build_directory(target: Path, build: Callable[[Path], None], resumable: bool = False) -> None:
    """Makes the directory `target`: `build` fills a hidden directory beside it, which is then synced and renamed.

    Waits while another process builds `target`, and does nothing if it exists. A failure removes the hidden directory;
    after a kill the next call removes it. resumable: a failure or a kill keeps the hidden directory unless it is empty,
    and the next `build` gets it.
    Raises DataError if the disk cannot be written, and every error of `build`.
    """
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target.with_name(f".{target.name}.lock"), f"preparing {target}") as locked:
            if locked:  # nobody else is at work, so these directories are of killed processes
                for stale in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
                    remove(stale)
            if not is_filled(target):
                # Without locks another process may be at work, so each has a directory of its own.
                _build(target, build, resumable and locked)
    except BaseException as error:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise DataError(
                f"{target} cannot be written ({error.strerror}); choose another place with data.out or data.cache"
            ) from error
        raise


def is_filled(target: Path) -> bool:
    """False if `target` does not exist or is an empty directory: a directory can then be renamed to it."""
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


def _build(target: Path, build: Callable[[Path], None], resumable: bool) -> None:
    name = f".{target.name}.partial"
    partial = target.with_name(name if resumable else f"{name}-{uuid.uuid4().hex[:12]}")
    try:
        if partial.is_symlink():
            partial.unlink()  # the files behind a link are not ours
        partial.mkdir(exist_ok=resumable)
        build(partial)
        for path in [*partial.iterdir(), partial]:
            sync(path)
        try:
            os.rename(partial, target)
        except OSError as error:
            # Without locks another process may have been faster; its directory stays.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(target.parent)
    finally:
        if not resumable or (partial.is_dir() and not any(partial.iterdir())):
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def lock(path: Path, what: str, quiet: bool = False) -> Iterator[bool]:
    """Holds the lock file `path`. Yields False if the file system has no locks. A kill frees the lock.

    what: the work of the lock's holder, for the log line of a process that waits. quiet: without that line.
    Raises OSError if `path` cannot be written.
    """
    held = FileLock(path, fallback_to_soft=False)
    path.touch()  # raises OSError for a read-only place; a file system without locks is no error
    try:
        try:
            held.acquire(timeout=0)
        except Timeout:
            logger.log(logging.DEBUG if quiet else logging.INFO, "waiting for another process that is %s", what)
            held.acquire()
    except (OSError, NotImplementedError) as error:
        level = logging.DEBUG if quiet else logging.WARNING
        logger.log(level, "no file locks in %s (%s): several processes may be %s at once", path.parent, error, what)
        path.unlink(missing_ok=True)
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)  # before the release: a waiting process then makes a new one
        held.release()
