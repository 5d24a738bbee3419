"""What all sources of text have in common: shards of documents, and which documents are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ngpt_train.core.errors import DataError


class FetchError(DataError):
    """A shard that cannot be reached, which says nothing about its content."""


@dataclass(frozen=True)
class Shard:
    """A part of a text that is read as a whole: a file, several small ones, or a part of a large one.

    identity: changes with its content. part: of a single file, the row groups (parquet) from the first number to
    before the second, or the lines (jsonl) that begin at these bytes.
    """

    name: str
    identity: str
    files: tuple[str, ...]
    part: tuple[int, int] | None = None


class ShardSource(Protocol):
    """Reads the documents of shards. Travels to worker processes."""

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The documents of a shard, in order; `scratch` is a directory for what has to be fetched.

        Raises FetchError where the shard cannot be reached, DataError where it is faulty.
        """
        ...


def place_of(text: bytes) -> float:
    """A document's place in [0, 1), by its text alone: validation takes those below data.val_fraction."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


def halves(text: str, val_fraction: float) -> tuple[str, str]:
    """A text that is a single document, cut in two: its last `val_fraction`, from the start of a line, validates."""
    cut = len(text) - max(1, round(val_fraction * len(text)))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return text[:cut], text[cut:]


@dataclass
class Counts:
    """What is known of documents without their text; `smallest` and `largest` of their places."""

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    validation: int = 0
    smallest: float = 1.0
    largest: float = 0.0

    def add(self, other: Counts) -> None:
        self.documents += other.documents
        self.bytes += other.bytes
        self.empty += other.empty
        self.validation += other.validation
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
