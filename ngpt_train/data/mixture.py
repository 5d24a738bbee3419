"""Rows from several sources: a seeded hash of the row's number says which.

Row j belongs to virtual stream j mod n_streams, as without a mixture, and is the next row of that stream of its
source: every source has all the streams. So a row depends on the rows of its own stream alone, and a rank reads the
streams that it reads without a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngpt_train.data.permutation import uniform
from ngpt_train.data.rows import Batch, Reader
from ngpt_train.data.streamed.workers import Share

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

    rows: of the run that were taken before; taken: rows (n_streams,) that each stream has given of the source.
    """

    mixture: Mixture
    index: int
    rows: int
    share: Share
    taken: NDArray[np.int64]

    def __iter__(self) -> Iterator[int]:
        taken = self.taken.copy()
        step = self.share.step(len(taken))
        first = self.share.next_row(self.rows, step)
        while True:
            rows = first + step * np.arange(BLOCK)
            for row in rows[self.mixture.sources(rows) == self.index].tolist():
                number = number_of(row, taken)
                if row % self.share.world_size == self.share.rank:
                    yield number
            first += step * BLOCK


def number_of(row: int, taken: NDArray[np.int64]) -> int:
    """The number, within its source, of a row of the run; counts it in `taken` (n_streams,)."""
    stream = row % len(taken)
    number = int(taken[stream]) * len(taken) + stream
    taken[stream] += 1
    return number


class MixtureReader(Reader):
    """This rank's rows of a mixture. rows: of the run that were taken before; taken: of them (sources, n_streams) that
    each stream has given of each source."""

    def __init__(
        self, mixture: Mixture, readers: Sequence[Reader], rows: int, share: Share, taken: NDArray[np.int64]
    ) -> None:
        self._mixture, self._readers, self._share = mixture, readers, share
        n_streams = taken.shape[1]
        self._step = share.step(n_streams)
        self._next = share.next_row(rows, self._step)
        owned = share.streams(n_streams)
        self._taken = np.full_like(taken, -1)
        self._taken[:, owned] = taken[:, owned]
        # Every row before counts on one rank, also where several read its stream.
        self._own = taken[:, range(share.rank, n_streams, share.world_size)].sum(axis=1)

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        # All rows of this rank's streams are counted, those that other ranks take too.
        rows = np.arange(self._next, numbers[-1] + 1, self._step)
        self._next = int(rows[-1]) + self._step
        sources = self._mixture.sources(rows)
        within = np.array(
            [number_of(row, self._taken[source]) for row, source in zip(rows.tolist(), sources, strict=True)]
        )
        own = rows % self._share.world_size == self._share.rank
        sources, within = sources[own], within[own]
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
