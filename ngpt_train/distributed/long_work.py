"""Work that may take hours, waited for without a collective, which would end after parallel.timeout.

Whoever works counts up a number in the process group's store every few seconds; whoever waits looks whether it still
grows. So a wait lasts as long as the work does, and a rank that has died is noticed.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

SIGNS_OF_LIFE = 20  # within the silence after which a rank is given up
SLOWEST_LOOK = 1.0  # seconds between two looks of a rank that waits


class RankLostError(RuntimeError):
    """A rank that others wait for has died, or has failed and told."""

    exit_code = 1


@dataclass(frozen=True)
class LongWork:
    """One piece of work, the same on every rank: all of them construct it in the same order.

    silence: seconds without a sign of life after which a rank that works is taken for dead.
    """

    store: dist.Store
    name: str
    rank: int
    silence: float

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """This rank works inside, and is done, or has failed, afterwards."""
        ended = threading.Event()

        def live() -> None:
            with contextlib.suppress(dist.DistError):  # without a store the others know already
                while not ended.wait(self.silence / SIGNS_OF_LIFE):
                    self.store.add(_life_of(self.rank), 1)
                    self.store.add(f"{self.name}/life", 1)

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
        self.store.add(f"{self.name}/done", 1)

    def wait_for_rank(self, rank: int) -> None:
        """Until that rank has worked; raises RankLostError. It may be late, if it is at other long work until then."""
        self._wait(n_done=1, life=_life_of(rank), who=f"rank {rank}")

    def wait_for_all(self, size: int) -> None:
        """Until all ranks, `size` of them, have worked; raises RankLostError."""
        self._wait(n_done=size, life=f"{self.name}/life", who="a rank that the others wait for")

    def _wait(self, n_done: int, life: str, who: str) -> None:
        last_sign, last_time, pause = -1, time.monotonic(), 0.005
        try:
            while self.store.add(f"{self.name}/done", 0) < n_done:
                if self.store.check([f"{self.name}/failed"]):
                    raise RankLostError(self.store.get(f"{self.name}/failed").decode())
                sign, now = self.store.add(life, 0), time.monotonic()
                if sign != last_sign:
                    last_sign, last_time = sign, now
                elif now - last_time > self.silence:
                    raise RankLostError(
                        f"{who} has given no sign of life for {self.silence:g} s (parallel.timeout) and seems dead. "
                        "The reason stands in its own output; the same command starts again"
                    )
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_LOOK)
        except dist.DistError as error:
            raise RankLostError(f"{who} is gone, and the process group's store with it: {error}") from None


def _life_of(rank: int) -> str:
    return f"ngpt_train/life/{rank}"
