"""A data set: both splits as sequences of token ids, on disk or in memory, and their fingerprint."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data.tokenizers.tokenizer import Ids, Ints, Tokenizer

if TYPE_CHECKING:  # which make data sets
    from ngpt_train.data.mixed import Mixed
    from ngpt_train.data.streamed_text import StreamedText

CHUNK = 1 << 20  # numbers
AGAIN = "copy the directory again, or delete it and prepare it again"

OnMain = Callable[[Callable[[], Any]], Any]


class StoredNumbers:
    """The numbers [first, end) of a file, by default all. A slice of them is an array.

    The file is not mapped into memory: SIGBUS kills a process that touches a map beyond the end of a shortened file,
    while a read can name the file. A read of 1,025 numbers takes 1.75 us instead of 1.55 (two cores of an AMD EPYC).
    Raises DataError if the file was cut after it was opened, OSError if it cannot be opened or read.
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
        """The numbers [first, end) of these."""
        return StoredNumbers(self.path, self.dtype, self._first + first, self._first + end)

    def chunks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All numbers, as (start, numbers) of one chunk after the other."""
        for start in range(0, len(self), CHUNK):
            yield start, self[start : start + CHUNK]


Numbers = Ids | StoredNumbers


class Tokens:
    """A split as one sequence of token ids over its shards, each document with `eos` at its end.
    offsets[shard]: the start of each document and the end of the last. Without offsets `eos` ends a document."""

    def __init__(
        self, split: str, path: Path, shards: Sequence[Numbers], eos: int, offsets: Sequence[Numbers] | None = None
    ):
        self.split, self.path, self.eos = split, path, eos
        self._shards, self._offsets = shards, offsets
        self._starts = list(itertools.accumulate(map(len, shards), initial=0))

    @classmethod
    def of_documents(cls, split: str, path: Path, documents: Sequence[Ids], eos: int) -> Tokens:
        """A split in memory. documents: their ids, with eos at the end."""
        return cls(split, path, [np.concatenate(documents)], eos, [np.cumsum([0, *map(len, documents)])])

    def __len__(self) -> int:
        return self._starts[-1]

    def shard_lengths(self) -> list[int]:
        """Ids of each shard. A mixture's held-out text has a shard for each source."""
        return [len(shard) for shard in self._shards]

    @functools.cached_property
    def documents(self) -> tuple[Ints, Ints]:
        """Start and length of each document in order, eos included. A large split takes minutes. Raises DataError
        unless each document of a file of offsets ends after its beginning."""
        starts, lengths = [], []
        for shard, ids in enumerate(self._shards):
            if self._offsets is not None:
                stored = self._offsets[shard]
                offsets = stored[:].astype(np.int64)
                if isinstance(stored, StoredNumbers) and (np.diff(offsets, prepend=-1) <= 0).any():
                    raise DataError(f"{stored.path}: its documents do not follow one another; {AGAIN}")
            else:
                chunks = ids.chunks() if isinstance(ids, StoredNumbers) else [(0, ids)]
                ends = np.concatenate([np.flatnonzero(part == self.eos) + start + 1 for start, part in chunks])
                tail = [len(ids)] if not len(ends) or ends[-1] < len(ids) else []
                offsets = np.concatenate([[0], ends, tail]).astype(np.int64)
            starts.append(offsets[:-1] + self._starts[shard])
            lengths.append(np.diff(offsets))
        return np.concatenate(starts), np.concatenate(lengths)

    def ids(self, start: int, n: int) -> Ints:
        """The `n` tokens from `start` on, as `read` has them."""
        out = np.empty(n, np.int64)
        self.read(start, out)
        return out

    def read(self, start: int, out: Ids) -> None:
        """Fills `out` with the tokens from `start` on. Token -1 is eos, which opens the first document."""
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


class Examples(Tokens):
    """A split of examples: the ids of their texts, and the label's class or millionths."""

    def __init__(self, split: str, path: Path, eos: int, texts: list[list[Ids]], labels: Ints) -> None:
        super().__init__(split, path, [np.concatenate([*of_example, [eos]]) for of_example in texts], eos)
        self.texts, self.labels = texts, labels


class Pairs(Tokens):
    """A split of pairs, as ids without eos. It counts as one text, the translations. texts: of all pairs, also of those
    that are left out."""

    def __init__(
        self, split: str, path: Path, eos: int, pairs: Sequence[tuple[Ids, Ids]], texts: Sequence[Sequence[str]] = ()
    ) -> None:
        super().__init__(split, path, [np.append(translation, eos) for _, translation in pairs], eos)
        self.pairs, self.texts = pairs, texts
        # The longer side of each pair, with its eos.
        self.lengths = np.array([1 + max(map(len, pair)) for pair in pairs], np.int64)


@dataclass(frozen=True)
class Dataset:
    """Both splits. Equal token ids of equal tokenizers have equal fingerprints."""

    train: Tokens | StreamedText | Mixed
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path
    manifest: dict[str, Any]

    @property
    def commits(self) -> dict[str, str | None]:
        """The hub commit of each source, under the names of `config.sections.data.commits_of`."""
        source = self.manifest["source"]
        if source["kind"] != "mixture":
            return {"": source.get("revision")}
        return {name: part.get("revision") for name, part in source["sources"].items()}


def path_of(config: Config) -> Path:
    """The place of the text, for messages."""
    return Path(config.data.path or config.data.repo or config.data.kind)
