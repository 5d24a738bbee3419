"""Training batches: row k of the run is the same for any number of ranks, workers and restarts.

A `Reader` gives the rows of a rank. `TrainLoader` makes batches of them, each with the position in the data after it.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.dataset import Pairs
from ngpt_train.data.masks import Masks
from ngpt_train.data.pair_rows import MULTIPLE, PairRows, rows_multiple, window_of, window_size
from ngpt_train.data.permutation import GOLDEN, mix, shuffled
from ngpt_train.data.rows import Batch, Rows
from ngpt_train.data.tokenizers.tokenizer import Ints

ENDLESS = 2**62  # rows, more than any run reads


class Share(NamedTuple):
    """A rank's share of the rows of a run, and of the virtual streams."""

    rank: int
    world_size: int

    def step(self, n_streams: int) -> int:
        """The distance between two streams of the rank, and between two rows of its streams."""
        return math.gcd(self.world_size, n_streams)

    def streams(self, n_streams: int) -> range:
        """The streams of the rank. Other ranks may read them, too."""
        step = self.step(n_streams)
        return range(self.rank % step, n_streams, step)

    def next_row(self, rows: int, step: int) -> int:
        """The first row of `rows`, `rows` + 1, ... with the number `rank` modulo `step`."""
        return rows + (self.rank - rows) % step


class ReaderState(NamedTuple):
    """What a rank has read so far."""

    cursors: dict[str, Ints]  # of each stream (n_streams, width); -1 for streams of other ranks
    skipped: dict[str, str]  # the problem of each skipped shard, by name
    rows_by_source: dict[str, int]  # of each source of a mixture; their sums over all ranks are the rows of the run


class Reader:
    """This rank's rows of one source. A reader without streams defines `take` alone."""

    def take(self, numbers: Ints) -> Batch:
        """The next rows of this rank. numbers: their numbers in the source, (N,)."""
        raise NotImplementedError

    def size_of_step(self, rows: int, batch_rows: int) -> int:
        """The rows of all ranks in the step after `rows` rows; batch_rows: train.batch_rows."""
        return batch_rows

    def state(self) -> ReaderState:
        """After the rows taken so far."""
        return ReaderState({}, {}, {})

    def close(self) -> None:
        """Ends the processes that read ahead."""


@dataclass(frozen=True)
class PreparedReader(Reader):
    """Rows of prepared shards, shuffled anew in each epoch. Any row can be read at any time."""

    rows: Rows
    seed: int

    def take(self, numbers: Ints) -> Batch:
        return self.rows.batch(shuffled(numbers, len(self.rows), self.seed))


@dataclass(frozen=True)
class MaskedReader(Reader):
    """The rows of `reader`, masked by the run's seed and their numbers."""

    reader: Reader
    masks: Masks
    seed: int

    def take(self, numbers: Ints) -> Batch:
        return self.masks.of(self.reader.take(numbers), numbers, self.seed)

    def state(self) -> ReaderState:
        return self.reader.state()

    def close(self) -> None:
        self.reader.close()


class PairReader(Reader):
    """The training rows of pairs."""

    def __init__(self, pairs: Pairs, config: Config, world_size: int) -> None:
        """Raises ConfigError if ranks cannot share every batch evenly."""
        rows = config.train.rows_per_step
        most_tokens, seed = rows * config.model.context, config.run.seed
        self._rows, self._size = PairRows(pairs), window_size(len(pairs.lengths), most_tokens)
        self._window = functools.lru_cache(maxsize=2)(
            lambda number: window_of(pairs.lengths, number, rows, most_tokens, seed)
        )
        if rows_multiple(rows) % world_size:
            raise ConfigError(
                f"train.batch_rows={rows}: batches of pairs have multiples of {rows_multiple(rows)} rows, which "
                f"{world_size} ranks cannot share evenly\n  Use 1, 2, 4 or 8 ranks, and a multiple of {MULTIPLE} rows"
            )

    def size_of_step(self, rows: int, batch_rows: int) -> int:
        """The rows of the batch after `rows` rows."""
        window, offset = self._window(rows // self._size), rows % self._size
        return int(window.ends[window.batch_at(offset)]) - offset

    def take(self, numbers: Ints) -> Batch:
        """This rank's rows of a batch."""
        window, offsets = self._window(int(numbers[0]) // self._size), numbers % self._size
        half = int(window.halves[window.batch_at(int(offsets[0]))])
        return self._rows.batch(window.indices[offsets], half)


class Position(NamedTuple):
    """The position in the data after a batch, as far as this rank knows it."""

    rows: int  # taken so far by all ranks
    data_hash: int  # this rank's summand
    cursors: dict[str, Ints]  # see `ReaderState`
    skipped: dict[str, str]
    rows_by_source: dict[str, int]


def merged(positions: Sequence[Position]) -> dict[str, Any]:
    """The position of the run as JSON for a checkpoint. positions: of all ranks, after the same step."""
    names = positions[0].cursors
    cursors = {name: latest([position.cursors[name] for position in positions]).tolist() for name in names}
    total = data_hash([position.data_hash for position in positions])
    skipped = {name: problem for position in positions for name, problem in position.skipped.items()}
    return {"rows": positions[0].rows, "data_hash": total, "cursors": cursors, "skipped_shards": skipped}


def latest(cursors: Sequence[Ints]) -> Ints:
    """The furthest cursor of each stream. cursors[rank]: (n_streams, width)."""
    furthest = cursors[0]
    for other in cursors[1:]:
        differs = (other != furthest).argmax(axis=1)[:, None]  # the first different number decides
        later = np.take_along_axis(other, differs, 1) > np.take_along_axis(furthest, differs, 1)
        furthest = np.where(later, other, furthest)
    return furthest


def data_hash(summands: Sequence[int]) -> str:
    """16 hex digits for all rows so far. summands: `Position.data_hash` of all ranks after the same step."""
    return f"{sum(summands) % 2**64:016x}"


def check_position(state: Mapping[str, Any]) -> None:
    """Raises DataError unless `state` has the form of a result of `merged`."""
    rows, found, cursors, skipped = (state.get(name) for name in ("rows", "data_hash", "cursors", "skipped_shards"))
    if (
        type(rows) is not int
        or not 0 <= rows < ENDLESS
        or not (isinstance(found, str) and re.fullmatch("[0-9a-f]{1,64}", found))
        or not isinstance(cursors or {}, dict)
        or not isinstance(skipped or {}, dict)
    ):
        raise DataError("the checkpoint does not say how many rows were read, or where the streams are: it is damaged")


def stored_integers(state: Mapping[str, Any] | None, name: str, streams: int, width: int) -> Ints:
    """The integers (streams, width) of `name` in a checkpoint; zeros at the start of a run."""
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
    """Endless steps, each as `(micro_batches, position)`: this rank's rows of the global batch and the position after.

    Step s has the rows s * batch_rows to (s + 1) * batch_rows - 1 of the run; of pairs as many as `size_of_step` says.
    Rank r of R takes the rows r modulo R.
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
        assert batch_rows % (world_size * micro_rows) == 0
        self._reader, self._share = reader, Share(rank, world_size)
        self._batch_rows, self._n_micro = batch_rows, batch_rows // (world_size * micro_rows)
        self._rows = 0 if state is None else int(state["rows"])
        self._hash = 0 if state is None or rank else int(state["data_hash"], 16)

    def __next__(self) -> tuple[list[Batch], Position]:
        first = self._share.next_row(self._rows, self._share.world_size)
        self._rows += self._reader.size_of_step(self._rows, self._batch_rows)
        numbers = np.arange(first, self._rows, self._share.world_size)
        batch = self._reader.take(numbers)
        self._hash = (self._hash + hash_of_rows(numbers, batch)) % 2**64
        parts = [np.array_split(np.ascontiguousarray(part), self._n_micro) for part in batch]
        return list(zip(*parts, strict=True)), Position(self._rows, self._hash, *self._reader.state())

    def close(self) -> None:
        """Ends the processes that read ahead."""
        self._reader.close()


def hash_of_rows(numbers: Ints, batch: Batch) -> int:
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
