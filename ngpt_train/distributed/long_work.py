"""Waits for hours of work on other ranks. A collective would end after parallel.timeout.

A working rank increases a number in the process group's store every few seconds, and a waiting rank checks that the
number grows. So a wait may last as long as the work, and the death of a rank is noticed.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

SIGNS_OF_LIFE = 20  # signs of life in the time of `LongWork.silence`
SLOWEST_LOOK = 1.0  # most seconds between two checks of a waiting rank


class RankLostError(RuntimeError):
    """A rank has died or reported an error while others wait for it."""

    exit_code = 1


@dataclass(frozen=True)
class LongWork:
    """A piece of work that ranks do or wait for. All ranks construct their pieces in the same order.

    silence: a working rank counts as dead after so many seconds without a sign of life.
    """

    store: dist.Store
    name: str
    rank: int
    silence: float

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Gives signs of life inside. Reports this rank as done at the end, or as failed on an exception."""
        ended = threading.Event()

        def live() -> None:
            with contextlib.suppress(dist.DistError):  # the store is gone; the other ranks notice it themselves
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
        """Waits until `rank` is done. It may give its signs of life in another long work.

        Raises RankLostError if it has failed or is silent.
        """
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
