"""Directories that are complete as soon as they exist, built by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import remove, sync

logger = logging.getLogger(__name__)


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
