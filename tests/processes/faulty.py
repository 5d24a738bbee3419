"""`python -m tests.processes.faulty FAULT [RANGES] train ...`: the trainer with a fault, mostly of rank 1."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from ngpt_train.__main__ import run
from ngpt_train.data import TrainLoader
from ngpt_train.evaluation.validation import Evaluations
from ngpt_train.training import loop, train_step
from ngpt_train.training.checkpoint import catalogue
from ngpt_train.training.state import TrainState

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


def slow_check() -> None:
    slow(catalogue, "differences", 40)


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


def bad_rows() -> None:
    """On all ranks. RANGES of rows, whatever the ranks and restarts: [first row, last row, kind], which is `nonsense`,
    targets that follow no rule, or `infinite`, a loss whose gradients are not finite."""
    bad = json.loads(sys.argv.pop(1))
    take, kinds = TrainLoader.__next__, set[str]()

    def spoiled(self: TrainLoader) -> Any:
        first = self._rows
        batches, position = take(self)
        kinds.clear()
        kinds.update(kind for begin, end, kind in bad if begin < self._rows and first <= end)
        if "nonsense" in kinds:
            noise = np.random.default_rng(first + self._share.rank)
            batches = [(tokens, noise.integers(1, 256, targets.shape), *rest) for tokens, targets, *rest in batches]
        return batches, position

    def step(state: TrainState, micro_batches: Any, **options: Any) -> Any:
        factor = math.inf if "infinite" in kinds else 1.0
        handle = state.forward.register_forward_hook(lambda _, __, out: out._replace(total=out.total * factor))
        result = train_step(state, micro_batches, **options)
        handle.remove()
        return result

    TrainLoader.__next__ = spoiled  # type: ignore[method-assign]
    loop.train_step = step


if __name__ == "__main__":
    fault = globals()[sys.argv.pop(1)]
    if fault in (paced, bad_rows) or os.environ["RANK"] == "1":
        fault()
    run()
