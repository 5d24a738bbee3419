"""Units of text tokenized into parts: what a process hands over at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngpt_train.data.dataset import STEMS
from ngpt_train.data.streamed.documents import place_of
from ngpt_train.data.streamed.shard_cache import Shard, ShardSource
from ngpt_train.data.tokenizers import Tokenizer, encode_document

# Characters of a part, or one document: what a process holds in memory.
PART_CHARACTERS = 2_000_000


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


@dataclass
class SplitPart:
    """The documents of one split: their ids one after the other, each with eos, and of each its ids and bytes."""

    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]


@dataclass
class Part:
    """Some documents of a unit. taken: its documents up to here; digests: sha256 of the text of each in `counts`."""

    taken: int
    counts: Counts
    digests: list[bytes]
    splits: dict[str, SplitPart]


@dataclass(frozen=True)
class Tokenizing:
    """How text becomes parts. single: the text is one document, whose end validates."""

    reader: ShardSource
    tokenizer: Tokenizer
    dtype: str
    val_fraction: float
    single: bool

    def parts(self, shard: Shard, skip: int, scratch: Path) -> Iterator[Part]:
        """The unit after its first `skip` documents; at least one part. Raises DataError."""
        part = _Growing(self.dtype)
        eos = np.array([self.tokenizer.eos], self.dtype)
        taken = 0
        for text in self.reader.documents(shard, scratch):
            taken += 1
            if taken <= skip:
                continue
            if not text:
                part.counts.empty += 1
                continue
            for split, piece, size in self._placed(text, part):
                part.add(split, encode_document(self.tokenizer, piece), eos, size)
            part.characters += len(text)
            if part.characters >= PART_CHARACTERS:
                yield part.finish(taken)
                part = _Growing(self.dtype)
        yield part.finish(taken)

    def _placed(self, text: str, part: _Growing) -> list[tuple[str, str, int]]:
        data = text.encode()
        place = place_of(data)
        held_out = place < self.val_fraction
        part.counts.add(Counts(1, len(data), 0, int(held_out), place, place))
        part.digests.append(hashlib.sha256(data).digest())
        if not self.single:
            return [("validation" if held_out else "train", text, len(data))]
        first, second = halves(text, self.val_fraction)
        held_out_bytes = len(second.encode())
        return [("train", first, len(data) - held_out_bytes), ("validation", second, held_out_bytes)]


@dataclass
class _Growing:
    dtype: str
    counts: Counts = field(default_factory=Counts)
    digests: list[bytes] = field(default_factory=list)
    characters: int = 0
    ids: dict[str, list[NDArray[np.integer]]] = field(default_factory=lambda: {split: [] for split in STEMS})
    sizes: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in STEMS})
    lengths: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in STEMS})

    def add(self, split: str, ids: NDArray[np.integer], eos: NDArray[np.integer], size: int) -> None:
        self.ids[split] += [ids.astype(self.dtype), eos]
        self.lengths[split].append(len(ids) + 1)
        self.sizes[split].append(size)

    def finish(self, taken: int) -> Part:
        splits = {
            split: SplitPart(
                np.concatenate([np.empty(0, self.dtype), *self.ids[split]]),
                np.array(self.lengths[split], np.int64),
                np.array(self.sizes[split], np.int64),
            )
            for split in STEMS
        }
        return Part(taken, self.counts, self.digests, splits)


def halves(text: str, val_fraction: float) -> tuple[str, str]:
    """A single document cut in two: its last `val_fraction`, from the beginning of a line, validates."""
    cut = len(text) - max(1, round(val_fraction * len(text)))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return text[:cut], text[cut:]
