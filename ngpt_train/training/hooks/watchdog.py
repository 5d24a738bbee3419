"""Notices a rank that hangs, names it, and ends the job so that torchrun can start it again.

A stopped or stuck rank holds up all others in the next collective, which waits for parallel.timeout and then names
nobody. So a thread of each rank writes a beat into the process group's store every few seconds: a growing number, the
rank's work and its step. Each rank watches the beats of the next rank. A rank without a new beat is stopped or dead. A
rank in a step that takes much longer than any step before hangs, or waits for a rank that hangs. The rank that notices
asks all ranks for their Python stacks; one rank prints them, and all end.

The store is a process of one host. If that host or the network to it is gone, the store does not answer. A rank
without an answer ends by itself if its step does not end either.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ngpt_train.distributed.world import RankLostError, World
from ngpt_train.training.loop import STEP, Hook, TrainingRun

BEATS = 10  # within parallel.hang_seconds
# A step hangs if it takes TIMES_THE_LONGEST times the longest step of this start. The first steps compile, and do not
# count.
TIMES_THE_LONGEST, FIRST_STEPS = 20.0, 3
# A rank without a beat is found before the ranks that wait for it, because a step may take LONGER times as long.
LONGER = 1.5
BETWEEN = "what follows step"  # limited as a step is; other work, such as a validation, may take longer
FRAMES = 8  # of a stack, the innermost ones
EXIT_CODE = 1  # which torchrun starts again


class Watchdog(Hook):
    """Gives this rank's beats, and watches the next rank. Does nothing for a single rank, or for seconds=0. seconds: a
    rank hangs after so many without a beat, or in a step of at least LONGER times as many. on_end: called with the
    reason, on one rank, before the processes end."""

    def __init__(self, world: World, seconds: float, on_end: Callable[[str], None]) -> None:
        self._world, self._seconds, self._on_end = world, seconds, on_end
        self._doing, self._step, self._since = "the start before step", 0, time.monotonic()
        self._longest, self._steps, self._said = 0.0, 0, -1
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._looks = 0  # at the store, that the store has answered
        self._thread: threading.Thread | None = None
        if world.size > 1 and seconds:
            self._store = world.own_store("watchdog")
            self._beat_number = 0
            self._give_sign()  # the first one here, so that a rank that is stopped at once has given one
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch_store, name="watchdog of the store", daemon=True).start()

    @contextmanager
    def during(self, doing: str, step: int) -> Iterator[None]:
        """Inside, this rank's main thread is `doing` something at `step`."""
        self._doing, self._step, self._since = doing, step, time.monotonic()
        yield
        if doing == STEP:
            self._steps += 1
            if self._steps > FIRST_STEPS:
                self._longest = max(self._longest, time.monotonic() - self._since)
        self._doing, self._since = BETWEEN, time.monotonic()

    def close(self, run: TrainingRun) -> None:
        """Ends the beats, and tells the other ranks so."""
        if self._thread is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join(self._seconds)  # no longer: the store may be gone

    def _watch(self) -> None:
        seen = time.monotonic()
        last: dict[str, Any] | None = None
        neighbour = (self._world.rank + 1) % self._world.size
        try:
            while not self._ended.wait(self._seconds / BEATS):
                self._give_sign()
                if self._store.check([_END]):
                    self._end(self._store.get(_END).decode())
                now = time.monotonic()
                of_neighbour = self._beat(neighbour)
                if of_neighbour != last or of_neighbour is None or "closed" in of_neighbour:
                    last, seen = of_neighbour, now
                elif now - seen > self._seconds:
                    who = _who(neighbour, of_neighbour)
                    self._declare(f"{who} has given no sign of life for {now - seen:.0f} s, it is stopped or stuck")
                if self._hangs(now):
                    waited = f"{self._doing} {self._step} has taken {now - self._since:.0f} s"
                    self._declare(f"{waited}, the steps before {self._longest:.1f} s at most")
                self._looks += 1
            self._store.set(f"beat/{self._world.rank}", json.dumps(self._state() | {"closed": True}))
        except dist.DistError:  # the store is gone, which `_watch_store` notices
            return

    def _watch_store(self) -> None:
        looks = silent = 0
        # Looks are counted, not seconds: a process that was stopped has not waited meanwhile.
        while not self._ended.wait(self._seconds / BEATS):
            looks, silent = self._looks, (silent + 1 if looks == self._looks else 0)
            if silent > BEATS and self._is_stuck(time.monotonic() - self._since):
                reason = f"{_store()} has not answered for {silent * self._seconds / BEATS:.0f} s: that host, or the "
                reason += f"network to it, is gone; rank {self._world.rank} is in {self._doing} {self._step}"
                print(f"hung: {reason}. This rank ends.\n{self._stack()}", file=sys.stderr, flush=True)
                self._on_end(reason)
                os._exit(EXIT_CODE)

    def _is_stuck(self, seconds: float) -> bool:
        """True if the main thread waits for other ranks, after `seconds` of the same work. A step in progress needs no
        store, so a torchrun that is stopped for a while ends nothing."""
        if seconds < LONGER * max(self._seconds, self._longest):
            return False
        return self._doing in (STEP, BETWEEN) or _waits_for_others(self._stack())

    @contextmanager
    def around(self, run: TrainingRun) -> Iterator[None]:
        """Raises RankLostError, with the silent ranks, where a collective fails on one of several hosts because ranks
        are gone. Finding them takes two beats."""
        try:
            yield
        except RuntimeError as error:
            several = self._thread is not None and self._world.size > self._world.local_size
            if not several or hasattr(error, "exit_code") or not (gone := self._who_is_gone()):
                raise
            lost = f"{gone} is gone; the same command goes on from the last checkpoint"
            raise RankLostError(f"{lost}. {error}") from error

    def _who_is_gone(self) -> str:
        """Names the silent ranks (two beats without a sign of life); empty if there are none."""
        try:
            before = [self._beat(rank) for rank in range(self._world.size)]
            time.sleep(2 * self._seconds / BEATS)
            after = [self._beat(rank) for rank in range(self._world.size)]
        except dist.DistError:
            return _store()
        return "; ".join(_who(rank, beat) for rank, beat in enumerate(after) if beat and beat == before[rank])

    def _give_sign(self) -> None:
        self._beat_number += 1
        self._store.set(f"beat/{self._world.rank}", json.dumps(self._state() | {"beat": self._beat_number}))

    def _state(self) -> dict[str, Any]:
        return {"doing": self._doing, "step": self._step, "host": socket.gethostname(), "pid": os.getpid()}

    def _beat(self, rank: int) -> dict[str, Any] | None:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _hangs(self, now: float) -> bool:
        """True if the step takes too long and no rank has other work, which the rest must wait for."""
        if self._doing not in (STEP, BETWEEN) or self._longest == 0:
            return False
        if now - self._since < max(LONGER * self._seconds, TIMES_THE_LONGEST * self._longest):
            return False
        beats = {rank: self._beat(rank) for rank in range(self._world.size)}
        busy = [_who(rank, beat) for rank, beat in beats.items() if beat and beat["doing"] not in (STEP, BETWEEN)]
        if busy and self._said != self._step:
            self._said = self._step
            waited = f"rank {self._world.rank} has waited {now - self._since:.0f} s"
            print(f"{waited} for {'; '.join(busy)}", file=sys.stderr, flush=True)
        return not busy

    def _declare(self, reason: str) -> None:
        """Asks all ranks to end for this reason; an earlier reason of another rank stands."""
        self._end(self._store.compare_set(_END, "", reason).decode())

    def _end(self, reason: str) -> None:
        rank = self._world.rank
        self._store.set(f"stack/{rank}", json.dumps(self._state() | {"stack": self._stack()}))
        pause = 2 * self._seconds / BEATS  # all ranks look at the store meanwhile
        # The first rank here prints for all.
        if self._store.add(_PRINTER, 1) == 1:
            time.sleep(pause)
            print(self._report(reason), file=sys.stderr, flush=True)
            self._on_end(reason)
        else:
            time.sleep(2 * pause)
        os._exit(EXIT_CODE)

    def _stack(self) -> str:
        return "".join(traceback.format_stack(sys._current_frames()[self._main])[-FRAMES:])

    def _report(self, reason: str) -> str:
        """The reason and the stacks of all ranks. Ranks that do not wait for others come first."""
        stacks: dict[str, list[str]] = {}
        for rank in range(self._world.size):
            if self._store.check([f"stack/{rank}"]):
                found = json.loads(self._store.get(f"stack/{rank}"))
                stacks.setdefault(found["stack"], []).append(_who(rank, found))
            else:
                beat = self._beat(rank)
                stacks.setdefault("  no answer\n", []).append(_who(rank, beat) if beat else f"rank {rank}")
        ordered = sorted(stacks.items(), key=lambda item: _waits_for_others(item[0]))
        suspects = [who for stack, ranks in ordered if not _waits_for_others(stack) for who in ranks]
        blamed = f"not waiting for others: {'; '.join(suspects)}" if suspects else "all wait for others"
        line = f"hung: {reason}; {blamed}. All ranks end, and the same command goes on from the last checkpoint.\n"
        return line + "".join(f"{'; '.join(ranks)}:\n{stack}" for stack, ranks in ordered)


_END, _PRINTER = "end", "printer"


def _store() -> str:
    return f"the process group's store on {os.environ.get('MASTER_ADDR', 'this host')}"


def _who(rank: int, state: dict[str, Any]) -> str:
    return f"rank {rank} (process {state['pid']} on {state['host']}, in {state['doing']} {state['step']})"


def _waits_for_others(stack: str) -> bool:
    """True if the innermost frame is in a collective, or in the backward pass, which calls them."""
    innermost = [line for line in stack.splitlines() if line.lstrip().startswith("File ")][-1:]
    return any(part in line for line in innermost for part in ("torch/distributed/", "torch/autograd/"))
