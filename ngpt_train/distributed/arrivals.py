"""Who is missing in a collective that fails: gloo names no rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ngpt_train.distributed.long_work import RankLostError


class Arrivals:
    """Notes in a store how many collectives of one group each rank has come to.

    The store may be gone, with torchrun or the host that had it. Then nobody is named, and all else goes on.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store: dist.Store | None = store
        self._rank, self._size, self._number = rank, size, 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around each collective. Raises RankLostError, with the ranks that have not come, where it fails."""
        self._number += 1
        if self._store is not None:
            try:
                self._store.set(str(self._rank), str(self._number))
            except dist.DistError:
                self._store = None  # torch prints a stack at each try
        try:
            yield
        except RuntimeError as error:
            ranks = self._missing()
            who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
            raise RankLostError(f"{who} has not done its part, it is stopped or stuck ({error})") from error

    def _missing(self) -> list[int]:
        missing: list[int] = []
        if (store := self._store) is not None:
            with suppress(dist.DistError):
                for rank in range(self._size):
                    if not store.check([str(rank)]) or int(store.get(str(rank))) < self._number:
                        missing.append(rank)
        return missing
