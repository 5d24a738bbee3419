"""Training batches: position k of the run is a row that seed and k decide, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ngpt_train.data.permutation import shuffled
from ngpt_train.data.shards import Tokens


class LoaderState(TypedDict):
    """Position of the run: rows consumed so far over all ranks. A checkpoint stores it as JSON."""

    rows: int


class TrainLoader(Iterator[tuple[list[tuple[Tensor, Tensor]], LoaderState]]):
    """Endless steps of this rank's share of the global batch, each with the position after it.

    Step s takes positions s * batch_rows to (s + 1) * batch_rows - 1 of the shuffled rows; rank r of R the
    r-th of R equal parts. An item is `(micro_batches, state)`: pairs `(tokens, targets)` of int64 tensors
    (micro_rows, context) on the CPU, and the LoaderState that continues after them.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        batch_rows: int,
        micro_rows: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        state: LoaderState | None = None,
    ):
        if batch_rows % (world_size * micro_rows) != 0:
            raise ValueError(f"{batch_rows} rows do not divide into {world_size} ranks x micro batches of {micro_rows}")
        tokens.check_rows(context)
        self._tokens, self._context, self._seed = tokens, context, seed
        self._batch_rows, self._micro_rows = batch_rows, micro_rows
        share = batch_rows // world_size
        self._share = np.arange(rank * share, (rank + 1) * share)
        self._rows = 0 if state is None else state["rows"]

    def __next__(self) -> tuple[list[tuple[Tensor, Tensor]], LoaderState]:
        indices = shuffled(self._rows + self._share, self._tokens.n_rows(self._context), self._seed)
        rows = torch.from_numpy(self._tokens.rows(indices, self._context))
        self._rows += self._batch_rows
        return list(micro_batches(rows, self._micro_rows)), {"rows": self._rows}


def micro_batches(rows: Tensor, micro_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits rows (N, context + 1) into `(tokens, targets)`, each (at most micro_rows, context) and contiguous."""
    for part in rows.split(micro_rows):
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def validation_rows(tokens: Tokens, context: int, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Indices of `n_rows` different rows (all there are, if fewer), ascending; the same for the same seed."""
    total = tokens.n_rows(context)
    return np.sort(shuffled(np.arange(min(n_rows, total)), total, seed))
