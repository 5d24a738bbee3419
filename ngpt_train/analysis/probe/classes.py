"""Classes of targets: each target has one label of every kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ngpt_train.analysis.probe.token_texts import TYPES, piece_types
from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.rows import rows_of


@dataclass(frozen=True)
class Classes:
    """labels: `(N, context)` indices in `names`; any index where a target does not count. says: the classes in
    words."""

    kind: str
    says: str
    names: Sequence[str]
    labels: NDArray[np.int64]


def of_frequency(targets: NDArray[np.int64], counts: NDArray[np.int64], counted: str) -> Classes:
    """Classes by the target's rank among all ids, the most frequent first: 1 to 10, 11 to 100, ...

    counts: `(vocab_size,)`; equal counts are ranked by id. counted: the counted text, in words.
    """
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(1, len(counts) + 1)
    ends = [10**power for power in range(1, len(str(len(counts))))] + [len(counts)]
    ends = [end for end, before in zip(ends, [0, *ends], strict=False) if end > before]
    names = [f"{first:,} to {end:,}" for first, end in zip([1, *(end + 1 for end in ends)], ends, strict=False)]
    of_ids = np.where(counts > 0, np.searchsorted(ends, ranks), len(ends))
    labels = of_ids[np.where(targets == IGNORED, 0, targets)]
    return Classes("frequency", f"rank of the target by frequency in {counted}", [*names, "not in it"], labels)


def of_position(targets: NDArray[np.int64]) -> Classes:
    """Classes by the target's position in its row from 0: 0, 1, 2 to 3, 4 to 7, ..."""
    context = targets.shape[1]
    octaves = np.array([position.bit_length() for position in range(context)])
    names = [
        f"{first} to {last}" if first < last else str(first)
        for octave in range(int(octaves[-1]) + 1)
        for first, last in [(2 ** (octave - 1) if octave else 0, min(2**octave, context) - 1)]
    ]
    return Classes("position", "position of the target in its row", names, np.broadcast_to(octaves, targets.shape))


def of_type(tokens: NDArray[np.int64], targets: NDArray[np.int64], pieces: list[str], eos: int) -> Classes:
    """Classes by the text of the target, and of the token before it."""
    counting = np.where(targets == IGNORED, 0, targets)
    return Classes("type", "the target's text", TYPES, piece_types(counting, tokens, pieces, eos))


def of_source(validation: Tokens, names: Sequence[str], config: Config, chosen: NDArray[np.int64]) -> Classes:
    """Classes by the source of the target's document in the mixture. chosen: the rows `(N,)`.

    The labels are the rows of a text in which each id is the number of its source.
    """
    lengths = validation.shard_lengths()
    assert len(lengths) == len(names)
    last = np.empty(1, np.int64)
    validation.read(len(validation) - 1, last)
    numbers = [np.full(n, number, np.int64) for number, n in enumerate(lengths)]
    # A document must end with eos here exactly if it does in the text.
    eos = len(names) - 1 if last[0] == validation.eos else len(names)
    starts, _ = validation.documents
    firsts = np.cumsum([0, *lengths])
    offsets = [
        np.append(starts[(starts >= first) & (starts < end)] - first, end - first) for first, end in pairwise(firsts)
    ]
    same_shape = Tokens(validation.split, validation.path, numbers, eos, offsets)
    _, labels, *_ = rows_of(same_shape, config).batch(chosen)
    return Classes("source", "the source of the document", names, labels)
