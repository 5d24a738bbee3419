"""Ranks wait for work that outlasts every collective, notice when nobody works any more, and wait long enough in a
collective for one whose text is late."""

import importlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.distributed.world import LongWork, RankLostError, World, join_world
from tests.processes.runs import arguments, write_corpus


def two_ranks(silence: float) -> tuple[LongWork, LongWork]:
    store = dist.HashStore()
    return LongWork(store, "work", 0, silence), LongWork(store, "work", 1, silence)


@pytest.mark.parametrize("signs", [0, 3])
def test_a_rank_that_has_died_is_noticed(signs: int) -> None:
    """Caught: waiting for ever, also after signs of life that came once; giving up without naming the rank."""
    main, waiting = two_ranks(silence=0.3)
    for _ in range(signs):
        main.store.add("ngpt_train/life/0", 1)
    started = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 0 has given no sign of life for 0\.3 s"):
        waiting.wait_for_rank(0)
    assert time.monotonic() - started < 3


def test_what_failed_is_told_at_once() -> None:
    main, waiting = two_ranks(silence=5)
    with pytest.raises(KeyboardInterrupt), main.working():
        raise KeyboardInterrupt
    with pytest.raises(RankLostError, match="rank 0: KeyboardInterrupt"):
        waiting.wait_for_rank(0)


def test_all_are_waited_for() -> None:
    """Caught: going on when the first is done, or while one still works, however long after the others."""
    first, second = two_ranks(silence=0.4)
    ended: list[float] = []

    def slow() -> None:
        with second.working():
            time.sleep(1.2)  # three silences
            ended.append(time.monotonic())

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(slow)
        with first.working():
            pass
        first.wait_for_all(2)
        assert ended
        working.result()


def test_who_is_missing_is_named() -> None:
    """Caught: "a rank that the others wait for", which nobody finds among hundreds."""
    first, second = two_ranks(silence=0.3)
    with second.working():
        pass  # and then it dies
    later = LongWork(first.store, "later work", 0, silence=0.3)
    with later.working():
        pass
    named = rf"^rank 1 \(process {os.getpid()} on {socket.gethostname()}\) has given no sign of life"
    with pytest.raises(RankLostError, match=named):
        later.wait_for_all(2)


def in_processes(ranks: int, store: Path, rank_main: Callable[[World], None], timeout: float) -> None:
    """Runs rank_main in forked processes with a process group of that timeout in seconds; all must return."""

    def start(rank: int) -> None:
        code = 1
        try:
            files = dist.FileStore(str(store), ranks)
            dist.init_process_group(
                "gloo", timeout=timedelta(seconds=timeout), store=files, rank=rank, world_size=ranks
            )
            rank_main(World(rank, ranks, rank, torch.device("cpu"), timeout=timeout))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=start, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # else pytest waits for it at its end
    assert codes == [0] * ranks


TIMEOUT = 2.0  # seconds that a collective waits


def outlasting(world: World) -> None:
    def slow() -> str:
        time.sleep(1.5 * TIMEOUT)
        return f"of rank {world.rank}"

    def wrong() -> None:
        raise DataError("the file is damaged")

    assert world.on_main_without_timeout(slow) == "of rank 0"
    # One rank is slow before both open something together, as a node is that prepares one source of a mixture.
    result = world.on_all_without_timeout(
        lambda: [slow() if world.is_main else "quick", world.on_main_without_timeout(lambda: "shared")]
    )
    assert result == [["of rank 0", "quick"][world.rank], "shared"]
    with pytest.raises(DataError, match="the file is damaged"):
        world.on_main_without_timeout(wrong)
    assert world.gather(world.rank) == [0, 1]


def test_work_outlasts_collectives(tmp_path: Path) -> None:
    """Caught: the work inside a collective, which ends after its timeout."""
    in_processes(2, tmp_path / "store", outlasting, TIMEOUT)


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_data_is_opened_outside_of_collectives(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: `on_main`, which waits for a download in a broadcast; ranks that go on before all have opened theirs."""
    seen: list[object] = []

    def open_dataset(config: Config, tokenizer: object, on_main: MethodType) -> None:
        seen.append(on_main.__func__)
        raise DataError("opened")

    def on_all(self: World, function: Callable[[], object]) -> object:
        seen.append("all")
        return function()

    given = arguments(tmp_path, write_corpus(tmp_path / "text.jsonl"), "train.steps=1", "eval.rows=1")
    if verb == "evaluate":
        assert main(["train", *given]) == 0
        given = [f"evaluate.checkpoint={tmp_path / 'runs/test'}", "train.device=cpu"]
    monkeypatch.setattr(World, "on_all_without_timeout", on_all)
    monkeypatch.setattr(importlib.import_module(f"ngpt_train.verbs.{verb}"), "open_dataset", open_dataset)
    assert main([verb, *given]) == DataError.exit_code
    # `evaluate` has compared the checkpoint with its manifest before, not in a collective either.
    assert seen[-2:] == ["all", World.on_main_without_timeout]


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (["data=embedded"], 7),
        (["data=local", "data.path=/text", "data.streaming=true"], 7),
        (["data=hf", "data.repo=OWNER/NAME"], 7 + 180),
        (["data=openwebtext"], 7 + 180),
        (["data=openwebtext", "data.streaming=false"], 7),
        (["data=mixture", "data.mixture='a 1 local /text; b 2 hf OWNER/NAME'"], 7 + 180),
        (["data=mixture", "data.mixture='a 1 local /text; b 2 tokens /ids'"], 7),
    ],
)
def test_a_collective_outlasts_the_fetch_of_a_shard(
    data: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: ranks that give up in the step's first collective while another fetches its next shard of the hub, which
    data.fetch_minutes allow it."""
    asked: list[timedelta] = []

    def init(*_: Any, timeout: timedelta, **__: Any) -> None:
        asked.append(timeout)

    monkeypatch.setattr(dist, "init_process_group", init)  # no group begins, so the world is one of one
    settings = ["scale=debug", "train.device=cpu", "parallel=ddp", "parallel.timeout=7", "data.fetch_minutes=3"]
    join_world(load_config([*settings, *data]))
    assert asked == [timedelta(seconds=seconds)]
