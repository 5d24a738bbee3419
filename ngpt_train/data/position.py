"""The rows of a rank, and the position in the data after them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngpt_train.core.errors import DataError
from ngpt_train.data.rows import Batch

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


class Reader:
    """This rank's rows of one source. A reader without streams defines `take` alone."""

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        """The next rows of this rank. numbers: their numbers in the source, (N,)."""
        raise NotImplementedError

    def cursors(self) -> dict[str, NDArray[np.int64]]:
        """The cursor of each stream after the rows taken so far, (n_streams, width). -1 for streams of other ranks."""
        return {}

    def skipped(self) -> dict[str, str]:
        """The problem of each skipped shard, by name."""
        return {}

    def rows_by_source(self) -> dict[str, int]:
        """This rank's rows of each source of a mixture so far. Their sums over all ranks are the rows of the run."""
        return {}

    def close(self) -> None:
        """Ends the processes that read ahead."""


class Position(NamedTuple):
    """The position in the data after a batch, as far as this rank knows it."""

    rows: int  # taken so far by all ranks
    data_hash: int  # this rank's summand
    cursors: dict[str, NDArray[np.int64]]  # see `Reader`
    skipped: dict[str, str]
    rows_by_source: dict[str, int]


def merged(positions: Sequence[Position]) -> dict[str, Any]:
    """The position of the run as JSON for a checkpoint. positions: of all ranks, after the same step."""
    names = positions[0].cursors
    cursors = {name: latest([position.cursors[name] for position in positions]).tolist() for name in names}
    total = data_hash([position.data_hash for position in positions])
    skipped = {name: problem for position in positions for name, problem in position.skipped.items()}
    return {"rows": positions[0].rows, "data_hash": total, "cursors": cursors, "skipped_shards": skipped}


def latest(cursors: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
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


def stored_integers(state: Mapping[str, Any] | None, name: str, streams: int, width: int) -> NDArray[np.int64]:
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
