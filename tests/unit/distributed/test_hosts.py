"""Ranks of several hosts, seen by one of them."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ngpt_train.core.errors import ConfigError, DataError, is_told_here
from ngpt_train.distributed.layouts import check_hosts, resolve_kind
from ngpt_train.distributed.world import RankLostError, World
from ngpt_train.training.hooks import watchdog
from ngpt_train.training.hooks.watchdog import Watchdog
from ngpt_train.training.loop import STEP
from tests.processes import fork_server

SECONDS = 0.5
RUN: Any = None  # of which the watchdog asks nothing


class Beside(World):
    """A rank 0 with others on another host, which are not there."""

    def on_main(self, function: Callable[[], Any]) -> Any:
        return function()

    def gather(self, item: Any) -> list[Any]:
        return [item, *range(1, self.size)]


def beside(size: int = 2) -> World:
    return Beside(0, size, 0, torch.device("cpu"), local_size=1)


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The process of a store, and its port. No fork of this process: its threads may hold locks that a store needs."""
    process = fork_server.Started(["tests.unit.distributed.store"])
    try:
        assert select.select([process.stdout], [], [], 60)[0], "no store after a minute"
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, server: tuple[int, int]) -> list[int]:
    """Exit codes with which the watchdog would have ended this process."""
    store = dist.TCPStore("localhost", server[1], is_master=False, timeout=timedelta(seconds=5))
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        threading.Event().wait()  # the watchdog's thread does no more

    monkeypatch.setattr(watchdog.dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    return codes


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_gone(server: tuple[int, int], ended: list[int], number: int, capfd: Any) -> None:
    """Its host has lost its power, or its process was killed. Caught: a rank that waits for it without an end."""
    reasons: list[str] = []
    guard = Watchdog(beside(), SECONDS, reasons.append)
    with guard.during(STEP, 7):
        os.kill(server[0], number)
        deadline = time.monotonic() + 20
        while not ended:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.05)
    guard._ended.set()
    if number == signal.SIGSTOP:
        os.kill(server[0], signal.SIGCONT)
    assert ended == [1]
    assert "the process group's store on alpha has not answered for" in reasons[0]
    assert "rank 0 is in step 7" in reasons[0]
    assert "in test_a_store_that_is_gone" in capfd.readouterr().err


def test_a_store_that_is_stopped_while_steps_go_on(server: tuple[int, int], ended: list[int]) -> None:
    """Caught: a run that ends because somebody stops its torchrun, which no step needs."""
    guard = Watchdog(beside(), SECONDS, lambda reason: None)
    os.kill(server[0], signal.SIGSTOP)
    for step in range(25):
        with guard.during(STEP, step):
            time.sleep(SECONDS / 5)
    guard._ended.set()
    os.kill(server[0], signal.SIGCONT)
    assert not ended


def test_who_is_gone_is_named(ended: list[int]) -> None:
    """Caught: "connection closed by peer" as all that is said of a host that dies; a rank that still lives is blamed;
    an error of another kind that is taken for it."""
    guard = Watchdog(beside(3), SECONDS, lambda reason: None)
    beat, died = guard._state() | {"host": "beta", "pid": 9}, threading.Event()

    def live() -> None:
        for number in range(1000):
            guard._store.set("beat/2", guard_json(beat | {"beat": number}))
            if died.wait(SECONDS / 20):
                return

    guard._store.set("beat/1", guard_json(beat | {"host": "gamma", "beat": 1}))
    thread = threading.Thread(target=live)
    thread.start()
    named = r"^rank 1 \(process 9 on gamma, in the start before step 0\) is gone; .* closed by peer$"
    with pytest.raises(RankLostError, match=named), guard.around(RUN):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(DataError), guard.around(RUN):
        raise DataError("its disk is full")
    died.set()
    thread.join()
    guard.close(RUN)


def guard_json(state: dict[str, Any]) -> str:
    return watchdog.json.dumps(state)


def test_hosts_of_uneven_size() -> None:
    """Caught: groups of different sizes on different hosts, which wait for each other for ever."""
    check_hosts(beside(2))
    with pytest.raises(ConfigError, match=r"hosts have 1 or 2 of them.*set parallel.shard to a divisor of 3") as caught:
        check_hosts(beside(3))
    assert is_told_here(caught.value)


def test_layout() -> None:
    assert resolve_kind("auto", 1, "cuda") == "single"
    assert resolve_kind("auto", 2, "cuda") == "fsdp"
    assert resolve_kind("auto", 2, "cpu") == "ddp"
    assert resolve_kind("auto", 16, "cuda", 8) == "hsdp"
    assert resolve_kind("auto", 8, "cuda", 8) == "fsdp"
    with pytest.raises(ConfigError, match=r"parallel.kind=single.*2 ranks"):
        resolve_kind("single", 2, "cpu")
