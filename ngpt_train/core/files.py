"""Writes files atomically: a reader finds the old content or the new content, never a part of either."""

import json
import os
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the content of `path`. After a kill or a power cut, `path` has either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until the operating system has written the file or directory to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Writes `content` to `path` as JSON, atomically (see `write_atomically`)."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises DataError where `path` cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested without end
        raise DataError(f"{path} is missing or damaged: {error}") from None
