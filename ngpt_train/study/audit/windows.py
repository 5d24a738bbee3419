"""Which parts of a run are trained again."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """The steps after `start`, from the checkpoint of that step or, at 0, from the first weights, up to `end`."""

    start: int
    end: int


def choose(
    checkpoints: Sequence[int], last: int, most: int, steps: int, seed: int, cuts: Collection[int] = ()
) -> list[Window]:
    """At most `most` windows of at most `steps` steps, drawn at random from those that there are, in their order.

    checkpoints: the steps of those that are kept. last: the last recorded step. cuts: steps that no window crosses,
    because the run went on differently there.
    """
    found = windows(checkpoints, last, steps, cuts)
    return sorted(random.Random(seed).sample(found, min(most, len(found))))


def windows(checkpoints: Sequence[int], last: int, steps: int, cuts: Collection[int] = ()) -> list[Window]:
    """Windows that do not overlap: from step 0 and from each checkpoint to the next one, or as far as `steps` goes."""
    kept = sorted({step for step in checkpoints if 0 < step <= last})
    found = []
    for start in (0, *kept):
        end = min([start + steps, last, *(step for step in (*kept, *cuts) if step > start)])
        if end > start:
            found.append(Window(start, end))
    return found
