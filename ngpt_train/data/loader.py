"""Training batches: row k of the run is the same for any number of ranks, workers and restarts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data.mixture import MixtureReader, Turns
from ngpt_train.data.open import Dataset, Mixed
from ngpt_train.data.permutation import GOLDEN, mix, shuffled
from ngpt_train.data.prepared.shards import Tokens
from ngpt_train.data.rows import Batch, Reader, Rows, Share, rows_of
from ngpt_train.data.streamed.balance import warn_of_repeats
from ngpt_train.data.streamed.stream import Cursor
from ngpt_train.data.streamed.workers import OnWait, Start, StreamReader

ENDLESS = 2**62


class Position(NamedTuple):
    """Where the data stands after a batch, as far as this rank knows.

    rows: consumed so far by all ranks; data_hash: this rank's part of the sum; cursors: by source, of the streams that
    this rank reads; skipped: what is wrong with shards that were left out, by name; rows_by_source: of a mixture, this
    rank's rows so far.
    """

    rows: int
    data_hash: int
    cursors: dict[str, NDArray[np.int64]]
    skipped: dict[str, str]
    rows_by_source: dict[str, int]


@dataclass(frozen=True)
class PreparedReader(Reader):
    """Rows of prepared shards, shuffled anew in each epoch. Any row can be read at any time."""

    rows: Rows
    seed: int

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        return self.rows.batch(shuffled(numbers, len(self.rows), self.seed))


def reader_of(
    data: Dataset,
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    state: Mapping[str, Any] | None = None,
    on_wait: OnWait = lambda seconds: None,
) -> Reader:
    """The training rows of rank `rank`, from `state` on, which a checkpoint holds (`merged`). on_wait: as of
    `StreamReader`.

    Of streamed text, fetches the shards that the first rows need: no collective with a time limit may wait for it.
    Raises DataError for the state of other data, or where a shard cannot be read.
    """
    if state is not None:
        _check_position(state)
    streams = config.data.streams
    rows = 0 if state is None else int(state["rows"])
    share = Share(rank, world_size)
    if not isinstance(data.train, Mixed):
        numbers = range(share.next_row(rows, world_size), ENDLESS, world_size)
        # Of the rows so far, stream s has given those that are s modulo the number of streams.
        given = (rows - np.arange(streams) + streams - 1) // streams
        return _reader_of_source(data, config, share, numbers, given, state, "", on_wait)
    mixture = data.train.mixture
    taken = np.stack([_stored(state, f"{name}/rows", streams, 1)[:, 0] for name in mixture.names])
    readers = [
        _reader_of_source(
            source, config, share, Turns(mixture, share, rows, taken, index), taken[index], state, f"{name}/", on_wait
        )
        for index, (name, source) in enumerate(zip(mixture.names, data.train.sources, strict=True))
    ]
    return MixtureReader(mixture, readers, share, rows, taken)


def _check_position(state: Mapping[str, Any]) -> None:
    """Raises DataError unless `state` has the form of what `merged` returns."""
    rows, found, cursors, skipped = (state.get(name) for name in ("rows", "data_hash", "cursors", "skipped_shards"))
    if (
        type(rows) is not int
        or not 0 <= rows < ENDLESS
        or not (isinstance(found, str) and re.fullmatch("[0-9a-f]{1,64}", found))
        or not isinstance(cursors or {}, dict)
        or not isinstance(skipped or {}, dict)
    ):
        raise DataError("the checkpoint does not say how many rows were read, or where the streams are: it is damaged")


def _reader_of_source(
    data: Dataset,
    config: Config,
    share: Share,
    numbers: Iterable[int],
    given: NDArray[np.int64],
    state: Mapping[str, Any] | None,
    prefix: str,
    on_wait: OnWait,
) -> Reader:
    """The rows `numbers` of one source, whose cursors `state` has under `prefix`; `given` is `Start.rows`."""
    if isinstance(data.train, Tokens):
        return PreparedReader(rows_of(data.train, config), config.run.seed)
    assert not isinstance(data.train, Mixed)
    cursors = _stored(state, f"{prefix}cursors", config.data.streams, len(Cursor._fields))
    left_out = {} if state is None else state["skipped_shards"]
    skipped = {shard.removeprefix(prefix): problem for shard, problem in left_out.items() if shard.startswith(prefix)}
    start = Start(cursors, given, skipped)
    data.train.fetch(start, share)
    if share.rank == 0 and state is None:
        warn_of_repeats(data.train.open(), data.train.settings)
    return StreamReader(data.train, numbers, start, share, config.data.workers, config.data.prefetch, on_wait)


def _stored(state: Mapping[str, Any] | None, name: str, streams: int, width: int) -> NDArray[np.int64]:
    """Integers (streams, width) of a checkpoint, zeros at the start."""
    if state is None:
        return np.zeros((streams, width), np.int64)
    try:
        stored = np.array(state["cursors"].get(name, []), np.int64)
    except (ValueError, TypeError, OverflowError, KeyError):  # no numbers
        stored = np.empty(0, np.int64)
    if stored.shape != (streams, width) or stored.min() < 0:
        raise DataError(f"the checkpoint does not say where its {streams} streams are ({name}): it is of other data")
    return stored


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
        """Ends the processes that read ahead."""
        self._reader.close()


def hash_of_rows(numbers: NDArray[np.int64], batch: Batch) -> int:
    """The sum, modulo 2^64, of one hash a row: of its number, its tokens and its last target. The same rows have the
    same sum in any order and grouping.

    A row's ids are multiplied with fixed words that look random: two rows that differ have the same hash once in 2^63.
    """
    tokens, last = batch[0].view(np.uint64), batch[1][:, -1].astype(np.uint64)
    words = _words(tokens.shape[1] + 1)
    return int(mix(tokens @ words[:-1] + last * words[-1] + mix(numbers.astype(np.uint64) + GOLDEN)).sum())


@functools.cache
def _words(n: int) -> NDArray[np.uint64]:
    return mix(np.arange(1, n + 1, dtype=np.uint64) * GOLDEN)


def merged(positions: Sequence[Position]) -> dict[str, Any]:
    """One position out of those of all ranks after the same step, as JSON for a checkpoint."""
    names = positions[0].cursors
    cursors = {name: latest([position.cursors[name] for position in positions]).tolist() for name in names}
    total = data_hash([position.data_hash for position in positions])
    skipped = {name: problem for position in positions for name, problem in position.skipped.items()}
    return {"rows": positions[0].rows, "data_hash": total, "cursors": cursors, "skipped_shards": skipped}


def latest(cursors: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Of each stream the cursor of the rank that has read it furthest; cursors: of each rank (n_streams, width)."""
    furthest = cursors[0]
    for other in cursors[1:]:
        differs = (other != furthest).argmax(axis=1)[:, None]  # the first number that does decides
        later = np.take_along_axis(other, differs, 1) > np.take_along_axis(furthest, differs, 1)
        furthest = np.where(later, other, furthest)
    return furthest


def data_hash(summands: Sequence[int]) -> str:
    """16 hex digits for all rows consumed so far. summands: `Position.data_hash` of all ranks after the same step."""
    return f"{sum(summands) % 2**64:016x}"
