"""The process group of training, its waits for long work, and the device of this process.

A collective ends after parallel.timeout; data may take hours to prepare. So a working rank increases a number in the
process group's store every few seconds, and a waiting rank checks that the number grows. The wait may last as long as
the work, and the death of a rank is noticed.
"""

import atexit
import ctypes
import functools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import sources_of
from ngpt_train.core.errors import ConfigError, told_by_rank_0
from ngpt_train.core.launcher import check_address

T = TypeVar("T")
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # 1: torchrun makes a new store each time it starts its processes

SIGNS_OF_LIFE = 20  # signs of life in the time of `LongWork.silence`
SLOWEST_LOOK = 1.0  # most seconds between two checks of a waiting rank

logger = logging.getLogger(__name__)


class RankLostError(RuntimeError):
    """A rank has died or reported an error while others wait for it."""

    exit_code = 1


@dataclass(frozen=True)
class LongWork:
    """A piece of work that ranks do or wait for. All ranks construct their pieces in the same order. silence: a working
    rank counts as dead after so many seconds without a sign of life."""

    store: dist.Store
    name: str
    rank: int
    silence: float

    @contextmanager
    def working(self) -> Iterator[None]:
        """Gives signs of life inside. Reports this rank as done at the end, or as failed on an exception."""
        ended = threading.Event()

        def live() -> None:
            with suppress(dist.DistError):  # the store is gone; the other ranks notice it themselves
                while not ended.wait(self.silence / SIGNS_OF_LIFE):
                    self.store.add(_life_of(self.rank), 1)
                    self.store.add(f"{self.name}/life", 1)

        self.store.set(_name_of(self.rank), f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})")
        self.store.add(_life_of(self.rank), 1)
        thread = threading.Thread(target=live, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            self.store.set(f"{self.name}/failed", f"rank {self.rank}: {type(error).__name__}: {error}")
            raise
        finally:
            ended.set()
            thread.join()
        self.store.set(f"{self.name}/done/{self.rank}", "")
        self.store.add(f"{self.name}/done", 1)

    def wait_for_rank(self, rank: int) -> None:
        """Waits until `rank` is done, perhaps in another long work. Raises RankLostError if it failed or is silent."""
        self._wait([rank], life=_life_of(rank))

    def wait_for_all(self, size: int) -> None:
        """Waits until all `size` ranks are done. Raises RankLostError if one has failed or all others are silent."""
        self._wait(range(size), life=f"{self.name}/life")

    def _wait(self, ranks: Sequence[int], life: str) -> None:
        last_sign, last_time, pause = -1, time.monotonic(), 0.005
        try:
            while self.store.add(f"{self.name}/done", 0) < len(ranks):
                if self.store.check([f"{self.name}/failed"]):
                    raise RankLostError(self.store.get(f"{self.name}/failed").decode())
                sign, now = self.store.add(life, 0), time.monotonic()
                if sign != last_sign:
                    last_sign, last_time = sign, now
                elif now - last_time > self.silence:
                    raise RankLostError(
                        f"{self._not_done(ranks)} has given no sign of life for {self.silence:g} s (parallel.timeout) "
                        "and seems dead. The reason stands in its own output; the same command starts again"
                    )
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_LOOK)
        except dist.DistError as error:
            host = os.environ.get("MASTER_ADDR", "this host")
            raise RankLostError(f"the process group's store on {host} is gone: {error}") from None

    def _not_done(self, ranks: Sequence[int]) -> str:
        """Names the ranks among `ranks` that are not done."""
        left = [rank for rank in ranks if not self.store.check([f"{self.name}/done/{rank}"])]
        names = [_name_of(rank) for rank in left]
        found = [self.store.get(name).decode() if self.store.check([name]) else "" for name in names]
        return "; ".join(name or f"rank {rank}" for rank, name in zip(left, found, strict=True))


def _life_of(rank: int) -> str:
    return f"ngpt_train/life/{rank}"


def _name_of(rank: int) -> str:
    return f"ngpt_train/name/{rank}"


class Arrivals:
    """Counts in a store the collectives that each rank has come to, because gloo does not name a rank that is missing.
    The store may be gone, with torchrun or the host that had it. Then no rank is named, and all else goes on."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store: dist.Store | None = store
        self._rank, self._size, self._number = rank, size, 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around each collective. Raises RankLostError, which names the missing ranks, where the collective fails."""
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


@dataclass(frozen=True)
class World:
    """This process's rank and device, and the number of ranks, 1 without torchrun. Its methods are collective."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1  # ranks of this host
    timeout: float = 600.0  # parallel.timeout: seconds of waiting for a silent rank
    group: dist.ProcessGroup | None = None  # None: the group of training
    arrivals: Arrivals | None = None  # with a group of its own: names the ranks that `gather` and `on_main` lack

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def beside(self) -> "World":
        """The same ranks with a second group, over CPUs, for the collectives of another thread. A collective call."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        _never_release(group)
        return replace(self, group=group, arrivals=Arrivals(self.own_store("arrivals"), self.rank, self.size))

    def own_store(self, name: str) -> dist.Store:
        """The process group's store for another thread: by a connection of its own, so that neither waits for the
        other, and without the keys of an earlier start, whose store torchrun may keep. A collective call."""
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        return dist.PrefixStore(f"ngpt_train/{name}/{self.on_main(lambda: uuid.uuid4().hex)}", store)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Takes the maximum of each element over all ranks in place, and returns `tensor`."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over all ranks, through CPUs, so that no rank waits for its GPU."""
        return self.max_(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_of(self, values: Sequence[int]) -> list[int]:
        """The sum of each value over all ranks, through CPUs. Exact below 2^63."""
        return self.sum_(torch.tensor(values, dtype=torch.int64)).tolist()

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, in order of rank, on every rank."""
        if self.size == 1:
            return [item]
        items: list[T] = [item] * self.size
        with self._noted():
            dist.all_gather_object(items, item, group=self.group)
        return items

    def on_main(self, function: Callable[[], T]) -> T:
        """Runs `function` on rank 0, within parallel.timeout. Every rank returns its result or raises its exception."""
        if self.size == 1:
            return function()
        return self._share_outcome_of_main(_outcome(function) if self.is_main else (None, None))

    def on_main_without_timeout(self, function: Callable[[], T]) -> T:
        """`on_main` for a function that may take hours, such as a download: the other ranks wait while rank 0 gives
        signs of life, and raise RankLostError if it is silent."""
        if self.size == 1:
            return function()
        work = self._long_work()
        outcome: tuple[T | None, Exception | None] = None, None
        if self.is_main:
            with work.working():
                outcome = _outcome(function)
        else:
            work.wait_for_rank(0)
        return self._share_outcome_of_main(outcome)

    def on_all_without_timeout(self, function: Callable[[], T]) -> T:
        """Runs `function`, which may take hours, on every rank; returns this rank's result when all ranks are done.
        Raises this rank's own exception at once, and RankLostError if another rank has failed or died. `function` may
        call `on_main_without_timeout`, but no other collective."""
        if self.size == 1:
            return function()
        work = self._long_work()
        with work.working():
            result = function()
        work.wait_for_all(self.size)
        return result

    def _share_outcome_of_main(self, outcome: tuple[T | None, Exception | None]) -> T:
        """Returns rank 0's result on every rank, or raises its exception. A collective call."""
        box = list(outcome)
        with self._noted():
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        result, failure = cast(T | None, box[0]), cast(Exception | None, box[1])
        if failure is not None:
            raise told_by_rank_0(failure)
        return cast(T, result)

    def _noted(self) -> AbstractContextManager[None]:
        return nullcontext() if self.arrivals is None else self.arrivals.noted()

    def _long_work(self) -> LongWork:
        store = dist.distributed_c10d._get_default_store()
        # Each rank counts its pieces of long work. The numbers agree, because all ranks do them in the same order.
        number = store.add(f"ngpt_train/long_work/{self.rank}", 1)
        return LongWork(store, f"ngpt_train/long_work_{number}", self.rank, self.timeout)


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def join_world(config: Config) -> World:
    """Joins the existing process group, or else the group of torchrun's processes. Without torchrun, parallel=ddp, fsdp
    and hsdp get a process group of one. Raises ConfigError if train.device requires a GPU and this process has none."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = resolve_device(config.train.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=collective_timeout(config))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            check_address()
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            dist.init_process_group(backend, timeout=timeout, store=_of_this_start(store), rank=rank, world_size=size)
        elif config.parallel.kind in ("ddp", "fsdp", "hsdp"):
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    if not dist.is_initialized():
        return World(rank=0, size=1, local_rank=0, device=device)
    _keep_process_group()
    size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(dist.get_rank(), size, local_rank, device, local_size, config.parallel.timeout)


def _of_this_start(store: dist.Store) -> dist.Store:
    """A part of torchrun's store for this start of its processes. torch 2.13 keeps the store when torchrun restarts its
    processes, and gloo then connects to addresses of dead processes. Several torchruns do not agree on the number of
    starts, so they need a new store for each."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return dist.PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not os.environ.get(NEW_STORE):
        logger.warning(
            "torchrun --max-restarts on several hosts: a restart may fail with `connection refused`. Set %s=1 for "
            "torchrun on all hosts",
            NEW_STORE,
        )
    return store


def collective_timeout(config: Config) -> float:
    """The time limit of a collective in seconds: parallel.timeout, and data.fetch_minutes more if shards of the hub are
    fetched during training: the first collective of a step waits for a rank with a late shard."""
    data = config.data
    fetches = data.streamed and any(source.data.on_hub for source in sources_of(data))
    return config.parallel.timeout + (60 * data.fetch_minutes if fetches else 0)


@functools.cache
def _keep_process_group() -> None:
    """Keeps gloo's destructor from running, and gives gloo's threads time before the interpreter ends.

    The destructor joins gloo's threads while it holds the interpreter's lock, for which a thread waits that still
    releases the tensors of the last collective: the finished process would hang. A thread that still waits when the
    interpreter ends would abort the process: hence the pause.
    """
    _never_release(dist.group.WORLD)
    atexit.register(time.sleep, 0.5)


def _never_release(group: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def resolve_device(device: str, local_rank: int) -> torch.device:
    """The device of this process for `train.device`. Raises ConfigError if the machine has no GPU for it."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"train.device={device}: this process is number {local_rank} on its machine, which has "
            f"{torch.cuda.device_count()} usable GPUs. Start as many processes per node as there are GPUs, "
            "or use train.device=cpu."
        )
    return torch.device("cuda", local_rank)
