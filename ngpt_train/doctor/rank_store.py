"""Messages between ranks through torchrun's key-value store, which works even if collectives do not.

Keys are `NAME/RANK`, values are JSON.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ngpt_train.doctor.findings import Place

STORE_SECONDS = 20.0  # limit of one answer of the store
LOOK_SECONDS = 0.05  # between two looks for an answer
CLOCK_SECONDS = 0.005  # the same during the comparison of clocks: it adds to their uncertainty
ROUNDS = 5  # of a comparison of clocks; the quickest counts


def here() -> Place:
    """The place of this process, from torchrun's variables."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return Place(
        rank=int(os.environ.get("RANK", "0")),
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
    )


def connection(place: Place, seconds: float = STORE_SECONDS, holds_store: bool = False) -> dist.Store:
    """A connection to the store of this start. A forked check needs its own connection.

    holds_store: this process serves the store, because torchrun does not. A single process has its own store. Raises
    RuntimeError if the store does not answer within `seconds`.
    """
    if place.size == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not holds_store:
        wait_for_port(address, port, seconds)
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, is_master=holds_store, timeout=limit, wait_for_workers=False)
    return dist.PrefixStore(f"ngpt_train/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def wait_for_port(address: str, port: int, seconds: float) -> None:
    """Waits for an open port. Raises RuntimeError after `seconds`; torch's store would take three times as long."""
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
    """Joins all ranks in a process group, in a check's process. Raises RuntimeError if a rank does not join."""
    store = dist.PrefixStore(group, connection(place, seconds))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=limit)


def tell(store: dist.Store, place: Place, name: str, item: Any) -> None:
    """Tells all ranks an item."""
    store.set(f"{name}/{place.rank}", json.dumps(item, default=str))


def told(
    store: dist.Store, name: str, ranks: Sequence[int], seconds: float, look: float = LOOK_SECONDS
) -> dict[int, Any]:
    """The items by rank, after at most `seconds`. Silent ranks are left out."""
    deadline = time.monotonic() + seconds
    keys = {rank: f"{name}/{rank}" for rank in ranks}
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(look)
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def places_told(store: dist.Store, size: int, seconds: float = 0.0) -> list[Place]:
    """The places of all ranks, after at most `seconds`. Silent ranks are left out."""
    return [Place(**place) for place in told(store, "place", range(size), seconds).values()]


def absent(store: dist.Store, place: Place, name: str, seconds: float) -> list[int]:
    """Waits for all ranks, at most `seconds`. Returns the missing ranks."""
    tell(store, place, name, True)
    come = told(store, name, range(place.size), seconds)
    return [rank for rank in range(place.size) if rank not in come]


def ask_clocks(store: dist.Store, place: Place, ranks: Sequence[int], seconds: float) -> dict[int, dict[str, float]]:
    """Compares this clock with the clocks of other ranks, in seconds by rank: `ahead`, and `uncertain` by so many.

    Silent ranks are left out.
    """
    deadline = time.monotonic() + seconds
    clocks: dict[int, dict[str, float]] = {}
    for rank in ranks:
        for turn in range(ROUNDS):
            before, left = time.time(), max(0.0, deadline - time.monotonic())
            tell(store, place, f"the clock of {rank}/{turn}", True)
            if not (answer := told(store, f"clock/{turn}", [rank], left, CLOCK_SECONDS)):
                break
            uncertain = (time.time() - before) / 2
            if rank not in clocks or uncertain < clocks[rank]["uncertain"]:
                clocks[rank] = {"ahead": answer[rank] - before - uncertain, "uncertain": uncertain}
    return clocks


def tell_clock(store: dist.Store, place: Place, seconds: float) -> None:
    """Answers rank 0's `ask_clocks`."""
    for turn in range(ROUNDS):
        if not told(store, f"the clock of {place.rank}/{turn}", [0], seconds, CLOCK_SECONDS):
            break
        tell(store, place, f"clock/{turn}", time.time())
