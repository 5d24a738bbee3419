"""Directories that `export` and `import` make, complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ngpt_train.core.errors import ConfigError
from ngpt_train.core.files import sync


def check_free(key: str, out: Path) -> None:
    """Raises ConfigError unless `out` may become a directory of ours."""
    if out.name in ("", ".."):  # `.` and the like: a finished directory is renamed to `out`, which needs a name
        raise ConfigError(f"{key}={out}: a path without a name at its end\n  Name a new directory, such as {key}=model")
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "has files in it, which stay" if out.is_dir() else "is there, and is no directory"
        raise ConfigError(f"{key}={out}: {what}\n  Name a new directory, or empty this one first")


@contextlib.contextmanager
def new_directory(key: str, out: Path) -> Iterator[Path]:
    """An empty directory beside `out`, which takes its name at the end of the `with`; an exception deletes it.

    Raises ConfigError where it cannot be made.
    """
    work = out.with_name(f".unfinished-{out.name}")
    shutil.rmtree(work, ignore_errors=True)  # what a killed process has left
    try:
        work.mkdir(parents=True)
    except OSError as error:
        problem = f"{key}={out}: {work} cannot be made ({error.strerror})"
        raise ConfigError(f"{problem}\n  Name a directory in a place that can be written") from None
    try:
        yield work
        if out.is_dir():
            out.rmdir()
        os.rename(work, out)
        sync(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
