"""Training batches: row k of the run is the same for any number of ranks, workers and restarts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ngpt_train.data.permutation import GOLDEN, mix, shuffled
from ngpt_train.data.prepared_rows import Rows
from ngpt_train.data.rows import Batch


class Position(NamedTuple):
    """Where the data stands after a batch, as far as this rank knows.

    rows: consumed so far over all ranks; data_hash: this rank's summand of it; cursors: by source, of the streams that
    this rank owns; skipped: what is wrong with shards that were left out, by name; rows_by_source: of a mixture, this
    rank's rows so far.
    """

    rows: int
    data_hash: int
    cursors: dict[str, NDArray[np.int64]]
    skipped: dict[str, str]
    rows_by_source: dict[str, int]


class Reader(Protocol):
    """This rank's rows of one source."""

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        """Rows `numbers` (N,) of the source, which are the next ones of this rank."""
        ...

    def cursors(self) -> dict[str, NDArray[np.int64]]:
        """What continues after the rows that were taken; -1 where another rank knows."""
        ...

    def skipped(self) -> dict[str, str]:
        """What is wrong with shards that were left out, by name."""
        ...

    def rows_by_source(self) -> dict[str, int]:
        """Of a mixture, the rows of each source that were taken so far."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PreparedReader:
    """Rows that are shuffled anew in each epoch and can be read at any number."""

    rows: Rows
    seed: int

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        return self.rows.batch(shuffled(numbers, len(self.rows), self.seed))

    def cursors(self) -> dict[str, NDArray[np.int64]]:
        return {}

    def skipped(self) -> dict[str, str]:
        return {}

    def rows_by_source(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class TrainLoader(Iterator[tuple[list[Batch], Position]]):
    """Endless steps of this rank's share of the global batch, each with the position after it.

    Step s has rows s * batch_rows to (s + 1) * batch_rows - 1 of the run; rank r of R those whose number is r modulo R.
    An item is `(micro_batches, position)`: tuples of int64 arrays (micro_rows, context), tokens and targets and what
    else the rows have.
    """

    def __init__(
        self,
        reader: Reader,
        batch_rows: int,
        micro_rows: int,
        rank: int = 0,
        world_size: int = 1,
        state: Mapping[str, Any] | None = None,
    ):
        """state: what `merged` made of the positions of all ranks."""
        if batch_rows % (world_size * micro_rows) != 0:
            raise ValueError(f"{batch_rows} rows do not divide into {world_size} ranks x micro batches of {micro_rows}")
        self._reader, self._rank, self._world_size = reader, rank, world_size
        self._batch_rows, self._micro_rows = batch_rows, micro_rows
        self._rows = 0 if state is None else int(state["rows"])
        self._hash = 0 if state is None or rank else int(state["data_hash"], 16)

    def __next__(self) -> tuple[list[Batch], Position]:
        first = self._rows + (self._rank - self._rows) % self._world_size
        self._rows += self._batch_rows
        numbers = np.arange(first, self._rows, self._world_size)
        batch = self._reader.take(numbers)
        self._hash = (self._hash + hash_of_rows(numbers, batch)) % 2**64
        parts = [np.split(np.ascontiguousarray(part), len(part) // self._micro_rows) for part in batch]
        reader = self._reader
        position = Position(self._rows, self._hash, reader.cursors(), reader.skipped(), reader.rows_by_source())
        return list(zip(*parts, strict=True)), position

    def close(self) -> None:
        """Ends what reads ahead."""
        self._reader.close()


def hash_of_rows(numbers: NDArray[np.int64], batch: Batch) -> int:
    """Sum over the rows of a hash of each one's number, tokens and last target, modulo 2^64: whoever adds up the same
    rows, in any order and grouping, has the same sum.

    A row's ids are multiplied with fixed words that look random: two rows that differ have the same hash once in 2^63.
    """
    tokens, last = batch[0].view(np.uint64), batch[1][:, -1].astype(np.uint64)
    words = _words(tokens.shape[1] + 1)
    return int(mix(tokens @ words[:-1] + last * words[-1] + mix(numbers.astype(np.uint64) + GOLDEN)).sum())


@functools.cache
def _words(n: int) -> NDArray[np.uint64]:
    return mix(np.arange(1, n + 1, dtype=np.uint64) * GOLDEN)


def merged(positions: Sequence[Position]) -> dict[str, Any]:
    """The positions of all ranks after the same step as one, for a checkpoint. JSON."""
    names = positions[0].cursors
    cursors = {name: np.max([position.cursors[name] for position in positions], axis=0).tolist() for name in names}
    total = data_hash([position.data_hash for position in positions])
    skipped = {name: problem for position in positions for name, problem in position.skipped.items()}
    return {"rows": positions[0].rows, "data_hash": total, "cursors": cursors, "skipped_shards": skipped}


def data_hash(summands: Sequence[int]) -> str:
    """Of all rows that were consumed so far, from the summands of all ranks after the same step: 16 hex digits."""
    return f"{sum(summands) % 2**64:016x}"


def validation_rows(rows: Rows, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Indices of `n_rows` different rows (all there are, if fewer), ascending; the same for the same seed."""
    total = len(rows)
    return np.sort(shuffled(np.arange(min(n_rows, total)), total, seed))
