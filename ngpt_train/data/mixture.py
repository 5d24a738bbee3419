"""Rows from several sources: a seeded hash of the row's number says which.

Row j belongs to virtual stream j mod n_streams, as without a mixture, and is the next row of that stream of its
source: every source has all the streams. So a row depends on the rows of its own stream alone, and streams belong
to ranks as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngpt_train.data.loader import Reader
from ngpt_train.data.permutation import uniform
from ngpt_train.data.rows import Batch

BLOCK = 4096  # rows whose sources are looked up at once


@dataclass(frozen=True)
class Mixture:
    """Names of the sources, and their shares of the rows, which add up to 1."""

    names: tuple[str, ...]
    shares: tuple[float, ...]
    seed: int

    def sources(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the source of each of `rows` (N,)."""
        bounds = np.cumsum(self.shares)[:-1]
        return np.searchsorted(bounds, uniform(rows, self.seed), side="right")


@dataclass(frozen=True)
class Turns:
    """Numbers, within source `index`, of the rows that a rank takes from it: row n of stream s has n * n_streams + s.

    first: the rank's next row, of which every `world_size`-th is its own; taken: rows (n_streams,) that each stream has
    read of the source.
    """

    mixture: Mixture
    index: int
    first: int
    world_size: int
    taken: NDArray[np.int64]

    def __iter__(self) -> Iterator[int]:
        taken, first = self.taken.copy(), self.first
        while True:
            rows = first + self.world_size * np.arange(BLOCK)
            for row in rows[self.mixture.sources(rows) == self.index].tolist():
                yield number_of(row, taken)
            first += self.world_size * BLOCK


def number_of(row: int, taken: NDArray[np.int64]) -> int:
    """The number, within its source, of a row of the run; counts it in `taken` (n_streams,)."""
    stream = row % len(taken)
    number = int(taken[stream]) * len(taken) + stream
    taken[stream] += 1
    return number


class MixtureReader:
    """This rank's rows of a mixture. taken: rows (sources, n_streams) read before."""

    def __init__(self, mixture: Mixture, readers: Sequence[Reader], taken: NDArray[np.int64], owned: range) -> None:
        self._mixture, self._readers = mixture, readers
        self._taken = np.full_like(taken, -1)
        self._taken[:, owned] = taken[:, owned]

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        sources = self._mixture.sources(numbers)
        whole: list[NDArray[np.int64]] = []
        for index, reader in enumerate(self._readers):
            (places,) = np.nonzero(sources == index)
            if not len(places):
                continue
            own = np.array([number_of(row, self._taken[index]) for row in numbers[places].tolist()])
            parts = reader.take(own)
            whole = whole or [np.empty((len(numbers), part.shape[1]), np.int64) for part in parts]
            for filled, part in zip(whole, parts, strict=True):
                filled[places] = part
        return tuple(whole)

    def cursors(self) -> dict[str, NDArray[np.int64]]:
        found: dict[str, NDArray[np.int64]] = {}
        for name, taken, reader in zip(self._mixture.names, self._taken, self._readers, strict=True):
            found[f"{name}/rows"] = taken[:, None].copy()
            found |= {f"{name}/{part}": cursors for part, cursors in reader.cursors().items()}
        return found

    def rows_by_source(self) -> dict[str, int]:
        """Rows that this rank's streams have read of each source."""
        sums = np.maximum(self._taken, 0).sum(axis=1).tolist()
        return dict(zip(self._mixture.names, sums, strict=True))

    def skipped(self) -> dict[str, str]:
        return {
            f"{name}/{shard}": problem
            for name, reader in zip(self._mixture.names, self._readers, strict=True)
            for shard, problem in reader.skipped().items()
        }

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
