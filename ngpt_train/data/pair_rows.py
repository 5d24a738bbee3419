"""Pairs of a text and its translation: their token ids, their rows, and batches of pairs of like length.

A row has two halves, both as wide as the longest text of its batch: the source and eos, for the encoder, then eos and
the translation, for the decoder, whose targets are the translation and eos. The rest of each half is padding, which has
no target, and a doc_id of PADDING.

The pairs are shuffled in each epoch. Of a window of consecutive ones those of like length make a batch: as many, in
multiples of `rows_multiple`, as have at most train.batch_tokens with their padding. The batches of a window come in a
seeded order. So a batch is a function of the run's seed and of the number of rows before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ngpt_train.core.constants import IGNORED, PADDING
from ngpt_train.data.permutation import keyed_order, shuffled
from ngpt_train.data.tokenizers.tokenizer import Ints

if TYPE_CHECKING:
    from ngpt_train.data.dataset import Pairs

WINDOW = 8192  # pairs of a window
MULTIPLE = 8  # of rows in a batch, so that 2, 4 or 8 ranks share it


class PairRows:
    """Row k is pair k of a split."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs.pairs)

    def batch(self, indices: Ints, half: int | None = None) -> tuple[Ints, ...]:
        """Tokens, targets and document ids, each (N, 2 half). half: by default the longest side of these pairs."""
        half = int(self.pairs.lengths[indices].max()) if half is None else half
        eos, shape = self.pairs.eos, (len(indices), 2 * half)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        doc_ids = np.full(shape, PADDING, np.int64)
        for row, index in enumerate(indices.tolist()):
            source, translation = self.pairs.pairs[index]
            n_source, end = len(source) + 1, half + len(translation) + 1
            tokens[row, :n_source] = np.append(source, eos)
            tokens[row, half:end] = np.append(eos, translation)
            targets[row, half:end] = np.append(translation, eos)
            doc_ids[row, :n_source] = doc_ids[row, half:end] = 0
        return tokens, targets, doc_ids


@dataclass(frozen=True)
class Window:
    """The pairs of a window in the order of its batches."""

    indices: Ints  # (window_size,)
    ends: Ints  # of each batch in `indices`
    halves: Ints  # the width of each batch

    def batch_at(self, offset: int) -> int:
        """The batch with the pair at `offset`."""
        return int(np.searchsorted(self.ends, offset, side="right"))


def rows_multiple(batch_rows: int) -> int:
    """Rows of a batch are a multiple of it: MULTIPLE, or less if train.batch_rows is no multiple of that."""
    return math.gcd(batch_rows, MULTIPLE)


def window_size(n_pairs: int, most_tokens: int) -> int:
    """Pairs that are sorted by length together, a multiple of MULTIPLE: WINDOW, or one for each token of a larger
    batch, so that a window has many batches; and no more than there are, so that a batch has no pair twice."""
    return max(MULTIPLE, min(n_pairs, max(WINDOW, most_tokens)) // MULTIPLE * MULTIPLE)


def window_of(lengths: Ints, number: int, batch_rows: int, most_tokens: int, seed: int) -> Window:
    """Window `number` of a run. lengths: of all pairs. most_tokens: of a batch, padding included, enough for batch_rows
    of the longest pairs."""
    size = window_size(len(lengths), most_tokens)
    indices = shuffled(np.arange(number * size, (number + 1) * size), len(lengths), seed)
    indices = indices[np.argsort(lengths[indices], kind="stable")]
    parts = [indices[first:end] for first, end in _cuts(lengths[indices], rows_multiple(batch_rows), most_tokens)]
    parts = [parts[k] for k in keyed_order(len(parts), seed, number)]
    halves = [int(lengths[part].max()) for part in parts]
    return Window(np.concatenate(parts), np.cumsum([len(part) for part in parts]), np.array(halves))


def _cuts(lengths: Ints, multiple: int, most_tokens: int) -> Iterator[tuple[int, int]]:
    """First and end of each batch. lengths: ascending."""
    first = 0
    while first < len(lengths):
        end = first + multiple
        while end < len(lengths) and 2 * (end + multiple - first) * lengths[end + multiple - 1] <= most_tokens:
            end += multiple
        yield first, end
        first = end
