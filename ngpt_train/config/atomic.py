"""Files that are the old ones or the new ones, never half of either."""

import os
from pathlib import Path


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
