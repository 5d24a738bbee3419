"""Training batches: position k of the run is a row that seed and k decide, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.data.permutation import shuffled
from ngpt_train.data.rows import Rows


class LoaderState(TypedDict):
    """Position of the run: rows consumed so far over all ranks. A checkpoint stores it as JSON."""

    rows: int


class TrainLoader(Iterator[tuple[list[tuple[Tensor, ...]], LoaderState]]):
    """Endless steps of this rank's share of the global batch, each with the position after it.

    Step s takes positions s * batch_rows to (s + 1) * batch_rows - 1 of the shuffled rows; rank r of R the
    r-th of R equal parts. An item is `(micro_batches, state)`: tuples of int64 tensors (micro_rows, context) on
    the CPU, tokens and targets and what else the rows have, and the LoaderState that continues after them.
    """

    def __init__(
        self,
        rows: Rows,
        batch_rows: int,
        micro_rows: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        state: LoaderState | None = None,
    ):
        if batch_rows % (world_size * micro_rows) != 0:
            raise ValueError(f"{batch_rows} rows do not divide into {world_size} ranks x micro batches of {micro_rows}")
        self._source, self._seed = rows, seed
        self._batch_rows, self._micro_rows = batch_rows, micro_rows
        share = batch_rows // world_size
        self._share = np.arange(rank * share, (rank + 1) * share)
        self._rows = 0 if state is None else state["rows"]

    def __next__(self) -> tuple[list[tuple[Tensor, ...]], LoaderState]:
        indices = shuffled(self._rows + self._share, len(self._source), self._seed)
        parts = [part.contiguous().split(self._micro_rows) for part in self._source.batch(indices)]
        self._rows += self._batch_rows
        return list(zip(*parts, strict=True)), {"rows": self._rows}


def validation_rows(rows: Rows, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Indices of `n_rows` different rows (all there are, if fewer), ascending; the same for the same seed."""
    total = len(rows)
    return np.sort(shuffled(np.arange(min(n_rows, total)), total, seed))
