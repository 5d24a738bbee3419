"""Directories that appear whole or not at all, built by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import sync

logger = logging.getLogger(__name__)


def build_directory(target: Path, build: Callable[[Path], None], resumable: bool = False) -> None:
    """Makes `target` out of what `build` writes into the directory that it is given.

    If another process is building `target`, waits for it; if `target` is there then, does nothing. A failure or a
    kill leaves no `target`, and a failure nothing at all. resumable: what is in the hidden directory after a failure
    or a kill is given to the next `build`, which may use it; an empty one goes.
    Raises DataError if the disk cannot be written, and whatever `build` raises.
    """
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target) as locked:
            if locked:  # nobody else is at work, so what lies here was left by a killed process
                for stale in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
                    shutil.rmtree(stale)
            if not is_filled(target):
                # Without locks another process may be at work: each then has a directory of its own.
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
    """True unless a directory can be renamed to `target`: nothing is there, or an empty directory."""
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


def _build(target: Path, build: Callable[[Path], None], resumable: bool) -> None:
    name = f".{target.name}.partial"
    partial = target.with_name(name if resumable else f"{name}-{uuid.uuid4().hex[:12]}")
    try:
        partial.mkdir(exist_ok=resumable)
        build(partial)
        for path in [*partial.iterdir(), partial]:
            sync(path)
        try:
            os.rename(partial, target)
        except OSError as error:
            # Where files cannot be locked another process may have been faster; its directory stays.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync(target.parent)
    finally:
        if not resumable or (partial.is_dir() and not any(partial.iterdir())):
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[bool]:
    """Holds the lock file beside `target`; False where the file system has no locks. The kernel frees it on a kill."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = _flock(descriptor, target)
            # Whoever held the lock before has removed the file, and a lock on a removed file keeps nobody out.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield locked
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _flock(descriptor: int, target: Path) -> bool:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is preparing %s", target)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("no file locks in %s (%s): several processes may prepare it at once", target.parent, error)
        return False
    return True
