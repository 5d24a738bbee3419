"""New directories of `export` and `import`, complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ngpt_train.core.errors import ConfigError
from ngpt_train.core.files import sync


def check_free(key: str, out: Path) -> None:
    """Raises ConfigError unless `out` is free or an empty directory."""
    if out.name in ("", ".."):  # for example `.`: the finished directory is renamed to `out`, which needs a name
        raise ConfigError(f"{key}={out}: a path without a name at its end\n  Name a new directory, such as {key}=model")
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "has files in it, and none is overwritten" if out.is_dir() else "is there, and is no directory"
        raise ConfigError(f"{key}={out}: {what}\n  Name a new directory, or empty this one first")


@contextlib.contextmanager
def new_directory(key: str, out: Path) -> Iterator[Path]:
    """A temporary directory beside `out`, renamed to `out` at the end of the `with`; an exception deletes it.

    Raises ConfigError if it cannot be made.
    """
    work = out.with_name(f".unfinished-{out.name}")
    shutil.rmtree(work, ignore_errors=True)  # of a killed process
    try:
        work.mkdir(parents=True)
    except OSError as error:
        problem = f"{key}={out}: {work} cannot be made ({error.strerror})"
        raise ConfigError(f"{problem}\n  Name a directory in a writable place") from None
    try:
        yield work
        if out.is_dir():
            out.rmdir()
        os.rename(work, out)
        sync(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
