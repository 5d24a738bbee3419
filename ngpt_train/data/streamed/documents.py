"""The documents of a shard, decoded once: a cache directory from which each can be read by its number.

text.bin    the UTF-8 text of all documents, one after the other
ends.bin    where each ends in it, <u8
places.bin  each one's place in [0, 1), <f8: those below data.val_fraction are held out
header.json number of documents, bytes, sha256 of these three, and what was wrong with a shard that is skipped
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = "header.json"
CHECKED = ("text.bin", "ends.bin", "places.bin")


def place_of(text: bytes) -> float:
    """A document's place in [0, 1), by its text alone: validation takes those below data.val_fraction."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


def write_documents(directory: Path, texts: Iterable[str]) -> None:
    """Writes all but empty documents, in their order; nothing else is held in memory than one of them."""
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
        # Not tofile, which says nothing of a full disk.
        (directory / name).write_bytes(data)
        sha256[name] = hashlib.sha256(data).hexdigest()
    header = {"documents": len(ends), "bytes": size, "empty": n_empty, "sha256": sha256, "bad": None}
    write_header(directory, header)


def write_bad(directory: Path, problem: str) -> None:
    """A shard without documents, because of a problem that is skipped."""
    write_documents(directory, ())
    write_header(directory, read_header(directory) | {"bad": problem})


def write_header(directory: Path, header: dict[str, Any]) -> None:
    (directory / HEADER).write_text(json.dumps(header) + "\n")


def read_header(directory: Path) -> dict[str, Any]:
    return json.loads((directory / HEADER).read_bytes())


class Documents:
    """Reads what `write_documents` wrote. Raises ValueError or OSError where the files do not fit the header."""

    def __init__(self, directory: Path) -> None:
        self.header = read_header(directory)
        n = self.header["documents"]
        for name, expected in (("text.bin", self.header["bytes"]), ("ends.bin", 8 * n), ("places.bin", 8 * n)):
            if (found := (directory / name).stat().st_size) != expected:
                raise ValueError(f"{name} has {found} bytes, not {expected}")
        self._text = _map(directory / "text.bin", "u1", self.header["bytes"])
        self._ends = _map(directory / "ends.bin", "<u8", n)
        self.places = _map(directory / "places.bin", "<f8", n)

    def __len__(self) -> int:
        return len(self._ends)

    def text(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._text[start : int(self._ends[index])].tobytes().decode()


def _map(path: Path, dtype: str, n: int) -> NDArray[Any]:
    # A map of no bytes is refused by the system.
    return np.asarray(np.memmap(path, dtype, mode="r")) if n else np.empty(0, dtype)
