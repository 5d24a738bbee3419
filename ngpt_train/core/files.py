"""Files that are the old ones or the new ones, never half of either."""

import json
import os
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError


def write_atomically(path: Path, content: bytes) -> None:
    """Gives `path` new content; a kill or a power cut at any moment leaves the old or the new."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until the file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON so that the file is the old one or the new one, never half of it."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """What `write_json` wrote; raises DataError where it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing or damaged: {error}") from None
