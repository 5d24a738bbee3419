"""How the ranks hear of each other: through the store of torchrun, which works where collectives do not."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ngpt_train.doctor.findings import Place

STORE_SECONDS = 20.0  # that one answer of the store may take
LOOK_SECONDS = 0.05  # between two looks whether another rank has answered
CLOCK_SECONDS = 0.005  # the same, where the waiting is what is measured
ROUNDS = 5  # of a comparison of clocks, of which the quickest counts


def here(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process, as torchrun's variables say it."""
    size = int(environment.get("WORLD_SIZE", "1"))
    return Place(
        rank=int(environment.get("RANK", "0")),
        size=size,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
        node=int(environment.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
    )


def connect(seconds: float = STORE_SECONDS, hosts_store: bool = False) -> dist.Store:
    """A connection to the store of this start. hosts_store: this process holds the store. Raises RuntimeError where the
    store does not answer."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not hosts_store:
        wait_for_port(address, port, seconds)
    store = dist.TCPStore(
        address, port, is_master=hosts_store, timeout=timedelta(seconds=seconds), wait_for_workers=False
    )
    return dist.PrefixStore(f"ngpt_train/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def wait_for_port(address: str, port: int, seconds: float) -> None:
    """Waits until somebody listens there. Raises RuntimeError in time, which torch's store does after three times as
    long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((address, port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() + LOOK_SECONDS > deadline:
                raise RuntimeError(error.strerror or str(error)) from None
        time.sleep(LOOK_SECONDS)


def join(place: Place, group: str, device: torch.device, seconds: float) -> None:
    """Joins all ranks in a process group, in a check's process. Raises RuntimeError where they do not come together."""
    store: dist.Store = dist.HashStore() if place.size == 1 else dist.PrefixStore(group, connect(seconds))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=limit)


class Exchange:
    """What ranks tell each other. Of a single process nothing leaves it.

    Raises RuntimeError where the store cannot be reached.
    """

    def __init__(self, place: Place, store: dist.Store | None) -> None:
        self.place, self._store = place, store
        self._own: dict[str, str] = {}

    @classmethod
    def begun(cls, place: Place, seconds: float) -> Exchange:
        """The first connection of a rank, which may have to wait for rank 0."""
        if place.size == 1:
            return cls(place, None)
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(place, connect(seconds, hosts_store=place.rank == 0 and not by_torchrun))

    @classmethod
    def joined(cls, place: Place) -> Exchange:
        """A connection of its own for a check's process, which must not share one with its parent."""
        return cls(place, None if place.size == 1 else connect())

    def post(self, name: str, item: Any) -> None:
        """Tells all ranks an item, as JSON."""
        content = json.dumps(item, default=str)
        if self._store is None:
            self._own[name] = content
        else:
            self._store.set(f"{name}/{self.place.rank}", content)

    def gather(
        self, name: str, seconds: float, ranks: Sequence[int] | None = None, look: float = LOOK_SECONDS
    ) -> dict[int, Any]:
        """The items of the ranks, by default all, that have told theirs within so many seconds."""
        if self._store is None:
            return {0: json.loads(self._own[name])}
        deadline = time.monotonic() + seconds
        missing = list(range(self.place.size) if ranks is None else ranks)
        items: dict[int, Any] = {}
        while True:
            for rank in [rank for rank in missing if self._store.check([f"{name}/{rank}"])]:
                items[rank] = json.loads(self._store.get(f"{name}/{rank}"))
                missing.remove(rank)
            if not missing or time.monotonic() > deadline:
                return dict(sorted(items.items()))
            time.sleep(look)

    def meet(self, name: str, seconds: float) -> list[int]:
        """Waits until all ranks are here; the ranks that were not in time."""
        self.post(name, True)
        come = self.gather(name, seconds)
        return [rank for rank in range(self.place.size) if rank not in come]

    def ask_clock(self, seconds: float) -> dict[str, float] | None:
        """By how many seconds this host's clock is ahead of rank 0's, and how exactly that is known."""
        if self._store is None or self.place.rank == 0:
            return None
        best: dict[str, float] | None = None
        for turn in range(ROUNDS):
            before = time.time()
            self.post(f"clock/{turn}", True)
            answer = self.gather(f"clock of {self.place.rank}/{turn}", seconds, [0], look=CLOCK_SECONDS)
            after = time.time()
            if not answer:
                return best
            if best is None or after - before < 2 * best["uncertain"]:
                best = {"ahead": (before + after) / 2 - answer[0], "uncertain": (after - before) / 2}
        return best

    def answer_clocks(self, ranks: Sequence[int], seconds: float) -> None:
        """Rank 0's part of `ask_clock`, for all the ranks that ask."""
        assert self._store is not None
        deadline = time.monotonic() + seconds
        turns = dict.fromkeys(ranks, 0)
        while turns and time.monotonic() < deadline:
            for rank, turn in list(turns.items()):
                if self._store.check([f"clock/{turn}/{rank}"]):
                    self.post(f"clock of {rank}/{turn}", time.time())
                    turns[rank] += 1
                    if turns[rank] == ROUNDS:
                        del turns[rank]
            time.sleep(CLOCK_SECONDS)
