"""A split as one sequence of token ids, on disk or in memory, and numbers in a file, read when they are asked for."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.errors import DataError

CHUNK = 1 << 20  # numbers
AGAIN = "copy the directory again, or delete it and prepare it again"


class StoredNumbers:
    """The numbers `first` to before `end` of a file of `dtype`, by default all; a slice of them is an array.

    Not mapped into memory: a process that touches a page of a map whose file has been cut is killed by SIGBUS without a
    word. A read then names the file; for 1,025 numbers it takes 1.75 us instead of 1.55 (two cores of an AMD EPYC).
    Raises DataError where the file has been cut since it was opened, OSError where it cannot be opened or read.
    """

    def __init__(self, path: Path, dtype: str | np.dtype[Any], first: int = 0, end: int | None = None) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._file = path.open("rb", buffering=0)
        self._first = first
        self._end = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize if end is None else end

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, step = part.indices(len(self))
        assert step == 1
        size = max(0, stop - start) * self.dtype.itemsize
        offset = (self._first + start) * self.dtype.itemsize
        data = os.pread(self._file.fileno(), size, offset)
        while len(data) < size:  # Linux reads at most 2 GB at a time
            more = os.pread(self._file.fileno(), size - len(data), offset + len(data))
            if not more:
                raise DataError(f"{self.path}: has been cut while it was read; restore it, and start again")
            data += more
        return np.frombuffer(data, self.dtype)

    def between(self, first: int, end: int) -> StoredNumbers:
        """These numbers of it, to be read as a whole file is."""
        return StoredNumbers(self.path, self.dtype, self._first + first, self._first + end)

    def chunks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All of it, as the place and the numbers of one chunk after the other."""
        for start in range(0, len(self), CHUNK):
            yield start, self[start : start + CHUNK]


class Tokens:
    """One split as one long sequence of token ids over shards on disk, each document with `eos` at its end.

    offsets: of each shard the start of each document and the end of the last; without them the documents are
    found by `eos`.
    """

    def __init__(
        self,
        split: str,
        path: Path,
        shards: Sequence[NDArray[np.integer] | StoredNumbers],
        eos: int,
        offsets: Sequence[NDArray[np.integer] | StoredNumbers] | None = None,
    ):
        self.split, self.path, self.eos = split, path, eos
        self._shards, self._offsets = shards, offsets
        self._starts = list(itertools.accumulate(map(len, shards), initial=0))

    @classmethod
    def of_documents(cls, split: str, path: Path, documents: Sequence[NDArray[np.integer]], eos: int) -> Tokens:
        """A split in memory. documents: ids of each, eos at their end."""
        return cls(split, path, [np.concatenate(documents)], eos, [np.cumsum([0, *map(len, documents)])])

    def __len__(self) -> int:
        return self._starts[-1]

    def shard_lengths(self) -> list[int]:
        """Ids of each shard; of the held-out text of a mixture, of each source."""
        return [len(shard) for shard in self._shards]

    @functools.cached_property
    def documents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and length, eos included, of each document, in order. A large split takes minutes."""
        starts, lengths = [], []
        for shard, ids in enumerate(self._shards):
            if self._offsets is not None:
                stored = self._offsets[shard]
                if isinstance(stored, StoredNumbers):
                    _check_offsets(stored)
                offsets = stored[:].astype(np.int64)
            else:
                chunks = ids.chunks() if isinstance(ids, StoredNumbers) else [(0, ids)]
                ends = np.concatenate([np.flatnonzero(part == self.eos) + start + 1 for start, part in chunks])
                tail = [len(ids)] if not len(ends) or ends[-1] < len(ids) else []
                offsets = np.concatenate([[0], ends, tail]).astype(np.int64)
            starts.append(offsets[:-1] + self._starts[shard])
            lengths.append(np.diff(offsets))
        return np.concatenate(starts), np.concatenate(lengths)

    def read(self, start: int, out: NDArray[np.integer]) -> None:
        """Fills `out` with the tokens from `start` on; before the first there is eos, which opens its document."""
        assert start >= -1
        assert start + len(out) <= len(self)
        if start < 0:
            out[0] = self.eos
            start, out = 0, out[1:]
        done = 0
        shard = bisect.bisect_right(self._starts, start) - 1
        while done < len(out):
            offset = start + done - self._starts[shard]
            part = self._shards[shard][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1


def _check_offsets(offsets: StoredNumbers) -> None:
    """Raises DataError unless each document ends after it begins; reads a part after the other."""
    before = -1
    for _, part in offsets.chunks():
        numbers = part.astype(np.int64)
        if (np.diff(numbers, prepend=before) <= 0).any():
            raise DataError(f"{offsets.path}: its documents do not follow one another; {AGAIN}")
        before = int(numbers[-1])
