"""The validation rows: a seeded choice among the rows of the held-out text.

The choice depends on the text, the context and eval.rows or eval.tokens. It never depends on the model, its seed or the
number of ranks. Indices are in the seeded order, and the first n are the choice of n rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.data.permutation import permuted
from ngpt_train.data.rows import NextToken, Rows

# Not run.seed, so that runs with different seeds are measured on the same text.
VALIDATION_SEED = 0
# eval.tokens chooses text in blocks of so many tokens. The usual contexts divide a block, so all cut the same text.
BLOCK_TOKENS = 16_384
COUNTED_TOGETHER = 1024  # rows


def chosen_rows(rows: Rows, config: Config) -> NDArray[np.int64]:
    """eval.rows rows, or enough rows for eval.tokens targets. All rows if there are fewer, or if both keys are null.

    eval.rows draws rows one by one. eval.tokens draws blocks of BLOCK_TOKENS of running text, but rows that are
    documents one by one.
    """
    total = len(rows)
    if config.eval.tokens is None:
        return permuted(np.arange(min(config.eval.rows or total, total)), total, VALIDATION_SEED)
    block = max(1, BLOCK_TOKENS // config.model.context) if isinstance(rows, NextToken) else 1
    n_blocks = -(-total // block)
    firsts = permuted(np.arange(n_blocks), n_blocks, VALIDATION_SEED) * block
    order = (firsts[:, None] + np.arange(block)).ravel()
    order = order[order < total]  # the last block of the text may be shorter
    return order[: _enough(rows, order, config.eval.tokens)]


def _enough(rows: Rows, order: NDArray[np.int64], n_targets: int) -> int:
    """The least n such that the first n rows of `order` have `n_targets` targets; all if they have fewer."""
    for first in range(0, len(order), COUNTED_TOGETHER):
        _, targets, *_ = rows.batch(order[first : first + COUNTED_TOGETHER])
        counts = (targets != IGNORED).sum(axis=1).cumsum()
        if counts[-1] >= n_targets:
            return first + int(np.searchsorted(counts, n_targets)) + 1
        n_targets -= int(counts[-1])
    return len(order)


def same_text(chosen: NDArray[np.int64], context: int, other: int, n_other: int) -> NDArray[np.int64]:
    """The rows of `other` tokens with the text of the `chosen` rows of `context` tokens.

    They are in the same order, each once, and end as soon as they have as many tokens.
    n_other: all rows of `other` tokens in the text.
    """
    first = chosen * context // other
    last = np.minimum(((chosen + 1) * context - 1) // other, n_other - 1)
    width = np.arange((last - first).max() + 1)
    overlapping = first[:, None] + width  # (N, most rows of `other` tokens that one row overlaps)
    found = overlapping[overlapping <= last[:, None]]
    unique, position = np.unique(found, return_index=True)
    in_order = unique[np.argsort(position)]
    return in_order[: -(-len(chosen) * context // other)]
