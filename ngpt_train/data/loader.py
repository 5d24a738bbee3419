"""Training batches: row k of the run is the same for any number of ranks, workers and restarts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset
from ngpt_train.data.epochs import warn_of_repeats
from ngpt_train.data.mixed import Mixed, MixtureReader, Turns
from ngpt_train.data.permutation import GOLDEN, mix, shuffled
from ngpt_train.data.position import ENDLESS, Position, Reader, Share, check_position, stored_integers
from ngpt_train.data.rows import Batch, Cursor, Rows, rows_of
from ngpt_train.data.streamed.workers import OnWait, Start, StreamReader
from ngpt_train.data.token_sequence import Tokens


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
    """The training rows of rank `rank`, from the `state` of a checkpoint on (`merged`). on_wait: see `StreamReader`.

    For streamed text it fetches the shards of the first rows, so no collective with a time limit may wait for it.
    Raises DataError if the state is of other data or a shard cannot be read.
    """
    if state is not None:
        check_position(state)
    streams = config.data.streams
    rows = 0 if state is None else int(state["rows"])
    share = Share(rank, world_size)
    if not isinstance(data.train, Mixed):
        numbers = range(share.next_row(rows, world_size), ENDLESS, world_size)
        # Stream s has given the rows s, s + streams, s + 2 streams, ... so far.
        given = (rows - np.arange(streams) + streams - 1) // streams
        return _reader_of_source(data, config, share, numbers, given, state, "", on_wait)
    mixture = data.train.mixture
    taken = np.stack([stored_integers(state, f"{name}/rows", streams, 1)[:, 0] for name in mixture.names])
    readers = [
        _reader_of_source(
            source, config, share, Turns(mixture, share, rows, taken, index), taken[index], state, f"{name}/", on_wait
        )
        for index, (name, source) in enumerate(zip(mixture.names, data.train.sources, strict=True))
    ]
    return MixtureReader(mixture, readers, share, rows, taken)


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
    """The rows `numbers` of one source. prefix: of its cursors in `state`; given: `Start.rows`."""
    if isinstance(data.train, Tokens):
        return PreparedReader(rows_of(data.train, config), config.run.seed)
    assert not isinstance(data.train, Mixed)
    cursors = stored_integers(state, f"{prefix}cursors", config.data.streams, len(Cursor._fields))
    left_out = {} if state is None else state["skipped_shards"]
    skipped = {shard.removeprefix(prefix): problem for shard, problem in left_out.items() if shard.startswith(prefix)}
    start = Start(cursors, given, skipped)
    data.train.fetch(start, share)
    if share.rank == 0 and state is None:
        warn_of_repeats(data.train.open(), data.train.settings)
    return StreamReader(data.train, numbers, start, share, config.data.workers, config.data.prefetch, on_wait)


class TrainLoader(Iterator[tuple[list[Batch], Position]]):
    """Endless steps, each as `(micro_batches, position)`: this rank's rows of the global batch and the position after.

    Step s has the rows s * batch_rows to (s + 1) * batch_rows - 1 of the run. Rank r of R takes the rows r modulo R.
    A micro batch is a tuple of int64 arrays (micro_rows, context): tokens, targets, and document ids if the model needs
    them.
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
        """state: the position of a checkpoint (`merged`)."""
        if batch_rows % (world_size * micro_rows) != 0:
            raise ValueError(f"{batch_rows} rows do not divide into {world_size} ranks x micro batches of {micro_rows}")
        self._reader, self._share = reader, Share(rank, world_size)
        self._batch_rows, self._micro_rows = batch_rows, micro_rows
        self._rows = 0 if state is None else int(state["rows"])
        self._hash = 0 if state is None or rank else int(state["data_hash"], 16)

    def __next__(self) -> tuple[list[Batch], Position]:
        first = self._share.next_row(self._rows, self._share.world_size)
        self._rows += self._batch_rows
        numbers = np.arange(first, self._rows, self._share.world_size)
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
    """The sum, modulo 2^64, of a hash of each row: its number, its tokens and its last target.

    The order and grouping of the rows do not change the sum. A row's ids are multiplied with fixed random-looking
    words: two different rows have the same hash once in 2^63.
    """
    tokens, last = batch[0].view(np.uint64), batch[1][:, -1].astype(np.uint64)
    words = _words(tokens.shape[1] + 1)
    return int(mix(tokens @ words[:-1] + last * words[-1] + mix(numbers.astype(np.uint64) + GOLDEN)).sum())


@functools.cache
def _words(n: int) -> NDArray[np.uint64]:
    return mix(np.arange(1, n + 1, dtype=np.uint64) * GOLDEN)
