"""Signals and the time limit; all ranks stop after the same step, asking each other rarely: clocks are made up, ranks
are threads."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ngpt_train.training.hooks.stopping import ASK_SECONDS, MOST_STEPS, StopRequest, StopTogether


class Meeting:
    """Where the ranks' collectives meet; a rank that comes alone breaks it."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, 0
        self.barrier, self.brought = threading.Barrier(size, timeout=10), [None] * size

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.brought[rank] = item
        self.barrier.wait()
        items = list(self.brought)
        self.barrier.wait()
        return items


class Rank:
    """Stands for a World and a StopRequest; its clock goes on by what its steps take."""

    def __init__(self, rank: int, meeting: Meeting, told_at: float | None) -> None:
        self.rank, self.meeting, self.told_at = rank, meeting, told_at
        self.size, self.seconds = meeting.size, 0.0

    def largest(self, values: Sequence[float]) -> list[float]:
        self.meeting.asked += self.rank == 0
        return [max(column) for column in zip(*self.meeting.exchange(self.rank, values), strict=True)]

    def gather(self, item: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, item)

    @property
    def reason(self) -> str | None:
        return "told" if self.told_at is not None and self.seconds >= self.told_at else None

    def train(self, step_seconds: Callable[[int, int], float], last: int) -> tuple[int, float, str | None]:
        """Step, time and reason of the end."""
        together = StopTogether(self, self, 0, clock=lambda: self.seconds)  # type: ignore[arg-type]
        for step in range(1, last + 1):
            self.seconds += step_seconds(self.rank, step)
            if reason := together.reason(step):
                return step, self.seconds, reason
        return last, self.seconds, None


def trained(
    step_seconds: Callable[[int, int], float], told_at: list[float | None], last: int
) -> tuple[list[tuple[int, float, str | None]], int]:
    """What `Rank.train` returns of each rank, and how often they asked."""
    meeting = Meeting(len(told_at))
    ranks = [Rank(rank, meeting, told) for rank, told in enumerate(told_at)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        ends = [end.result() for end in [pool.submit(rank.train, step_seconds, last) for rank in ranks]]
    return ends, meeting.asked


def uneven(rank: int, step: int) -> float:
    """Some steps are slower than others, and each rank's clock says something else."""
    return 0.02 * (1 + 0.5 * rank) * (1 + step * (rank + 1) % 3)


def test_ranks_stop_together_and_ask_about_once_a_second() -> None:
    """Caught: a question after every step; each rank going by its own clock."""
    ends, _ = trained(uneven, [None, 25.0, None], last=100_000)
    assert len({step for step, _, _ in ends}) == 1
    assert {reason for _, _, reason in ends} == {"told"}
    assert 25.0 <= ends[1][1] <= 25.0 + 2 * ASK_SECONDS
    ends, asked = trained(uneven, [None, None, None], last=2_000)
    assert {end[0::2] for end in ends} == {(2_000, None)}
    assert 0.3 * ASK_SECONDS < ends[2][1] / asked < 1.5 * ASK_SECONDS


def test_a_rank_alone_stops_at_once() -> None:
    """Caught: a Ctrl-C that a single process answers when several would have asked each other."""
    ends, asked = trained(lambda rank, step: 0.01, [0.995], last=1_000)
    assert ends == [(100, pytest.approx(1.0), "told")]
    assert asked == 100


@pytest.mark.parametrize("told", [3.0, 1000.0])
def test_slow_steps_are_asked_after_each(told: float) -> None:
    ends, asked = trained(lambda rank, step: 9.0, [None, told], last=1_000)
    step = math.ceil(told / 9)
    assert [end[:2] for end in ends] == [(step, 9.0 * step)] * 2
    assert asked == step


@pytest.mark.parametrize(("quick_steps", "late"), [(3, 4), (600, MOST_STEPS)])
def test_steps_that_become_slow(quick_steps: int, late: int) -> None:
    """The answer is late by so many slow steps, once; the first steps of a GPU only seem quick.

    Caught: after hundreds of quick steps an answer after hundreds of slow ones, or as many before the first slow one is
    seen.
    """

    def slower(rank: int, step: int) -> float:
        return 1e-3 if step <= quick_steps else 5.0

    for told_at in (1.0, 300.0):
        ends, _ = trained(slower, [told_at, None], last=2_000)
        slow_steps = math.ceil((told_at - 1e-3 * quick_steps) / 5)
        assert 0 <= ends[0][0] - quick_steps - slow_steps < (late if told_at < 5 * late else 1)


def test_stop_request_ignores_the_launchers_echo() -> None:
    """torchrun passes on the Ctrl-C that the terminal has sent to its workers as well."""
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(None) as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "stopped by SIGINT"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "stopped by SIGINT"
    assert signal.getsignal(signal.SIGINT) == before


def test_time_limit() -> None:
    stop = StopRequest(0.05 / 3600)
    assert stop.reason is None
    time.sleep(0.06)
    assert stop.reason == "stopped by run.max_time"
