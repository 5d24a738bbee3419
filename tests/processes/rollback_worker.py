"""`train` on this rank, with rows that are bad: JSON OVERRIDES... The JSON is a list of [first row, last row, kind]."""

import json
import math
import sys
from typing import Any

import numpy as np

from ngpt_train.__main__ import main
from ngpt_train.data import TrainLoader
from ngpt_train.training import loop, train_step
from ngpt_train.training.state import TrainState

KINDS = ("nonsense", "infinite")  # targets that follow no rule; a loss whose gradients are not finite


def spoil(bad: list[tuple[int, int, str]]) -> None:
    """Makes rows bad by their numbers in the run, on however many ranks and after whatever restart."""
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
    spoil(json.loads(sys.argv[1]))
    sys.exit(main(["train", *sys.argv[2:]]))
