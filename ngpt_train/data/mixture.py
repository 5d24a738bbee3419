"""Rows from several sources: a seeded hash of the row's number says which.

Row j belongs to virtual stream j mod n_streams, as without a mixture, and is the next row of that stream of its
source: every source has all the streams. So a row depends on the rows of its own stream alone, and a rank reads the
streams that it reads without a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ngpt_train.data.permutation import uniform
from ngpt_train.data.rows import Batch, Reader, Share

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


def turns(mixture: Mixture, share: Share, rows: int, taken: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Of each row that a rank takes, from row `rows` of the run on: its source, and its number within the source.

    Row n of stream s has the number n * n_streams + s. taken: rows (sources, n_streams) that each stream has given of
    each source; all rows of the rank's streams are counted there, those that other ranks take too.
    """
    n_streams = taken.shape[1]
    step = share.step(n_streams)
    first = share.next_row(rows, step)
    while True:
        block = first + step * np.arange(BLOCK)
        for row, source in zip(block.tolist(), mixture.sources(block).tolist(), strict=True):
            stream = row % n_streams
            number = int(taken[source, stream]) * n_streams + stream
            taken[source, stream] += 1
            if row % share.world_size == share.rank:
                yield source, number
        first += step * BLOCK


@dataclass(frozen=True)
class Turns:
    """The numbers that `turns` gives the rows of one source. Travels to worker processes."""

    mixture: Mixture
    share: Share
    rows: int
    taken: NDArray[np.int64]
    source: int

    def __iter__(self) -> Iterator[int]:
        for source, number in turns(self.mixture, self.share, self.rows, self.taken.copy()):
            if source == self.source:
                yield number


class MixtureReader(Reader):
    """This rank's rows of a mixture; `rows` and `taken` as in `turns`."""

    def __init__(
        self, mixture: Mixture, readers: Sequence[Reader], share: Share, rows: int, taken: NDArray[np.int64]
    ) -> None:
        self._mixture, self._readers = mixture, readers
        n_streams = taken.shape[1]
        owned = share.streams(n_streams)
        self._taken = np.full_like(taken, -1)
        self._taken[:, owned] = taken[:, owned]
        self._turns = turns(mixture, share, rows, self._taken)
        # Every row before counts on one rank, also where several read its stream.
        self._own = taken[:, range(share.rank, n_streams, share.world_size)].sum(axis=1)

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        sources, within = np.array(list(islice(self._turns, len(numbers)))).T
        whole: list[NDArray[np.int64]] = []
        for index, reader in enumerate(self._readers):
            (places,) = np.nonzero(sources == index)
            if not len(places):
                continue
            self._own[index] += len(places)
            parts = reader.take(within[places])
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
        return dict(zip(self._mixture.names, self._own.tolist(), strict=True))

    def skipped(self) -> dict[str, str]:
        return {
            f"{name}/{shard}": problem
            for name, reader in zip(self._mixture.names, self._readers, strict=True)
            for shard, problem in reader.skipped().items()
        }

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
