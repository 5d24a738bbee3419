"""`python -m tests.processes.faulty FAULT train ...`: the trainer with a fault."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ngpt_train.__main__ import run
from ngpt_train.evaluation.evaluations import Evaluations
from ngpt_train.training import loop
from ngpt_train.training.checkpoint import integrity
from ngpt_train.verbs import train

CLOCK = time.time
JUMPS = {0.0: 86400.0, 86400.0: -86400.0, -86400.0: 0.0}  # seconds, forth and back


def before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Has `act`, which is given the same, precede each call of a function."""
    function = getattr(owner, name)

    def wrapped(*given: Any, **options: Any) -> Any:
        act(*given, **options)
        return function(*given, **options)

    setattr(owner, name, wrapped)


def slow(owner: Any, name: str, seconds: float) -> None:
    def wait(*_: Any, **__: Any) -> None:
        if dist.is_initialized():
            print("slow", name, file=sys.stderr)
            time.sleep(seconds)

    before(owner, name, wait)


def paced() -> None:
    """Steps that take a while and no processor, so that a fault finds the run on its way."""
    before(loop, "train_step", lambda *_, **__: time.sleep(float(os.environ.get("PAUSE", "0.2"))))


def slow_preparation() -> None:
    slow(train, "open_dataset", 40)


def slow_check() -> None:
    slow(integrity, "differences", 40)


def slow_validation() -> None:
    slow(Evaluations, "row_losses", 12)


def jumping() -> None:
    """A clock that jumps by a day at each step."""
    jump = [0.0]
    before(loop, "train_step", lambda *_, **__: jump.insert(0, JUMPS[jump[0]]))
    time.time = lambda: CLOCK() + jump[0]


def hanging() -> None:
    """In step 10 of the first start."""

    def sleeping_beauty(state: Any, *_: Any, **__: Any) -> None:
        if state.step == 9:
            time.sleep(10_000)

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        before(loop, "train_step", sleeping_beauty)


if __name__ == "__main__":
    fault = globals()[sys.argv.pop(1)]
    if fault is paced or os.environ["RANK"] == "1":
        fault()
    run()
