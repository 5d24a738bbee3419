"""Numbered rows of prepared tokens, each read where it lies."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED
from ngpt_train.core.errors import DataError
from ngpt_train.data.packing import best_fit
from ngpt_train.data.prepared.shards import Tokens, check_length
from ngpt_train.data.rows import NOTHING, Batch, RowFormat, row_format

# Documents that are packed together: more waste no less, and packing takes longer.
PACKED_TOGETHER = 4096


class Rows(Protocol):
    """Numbered rows of `context` tokens each."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """Rows `indices` (N,)."""
        ...


def rows_of(tokens: Tokens, config: Config) -> Rows:
    """The rows that the config's model is trained on. Raises DataError if the split has none."""
    form = row_format(config, tokens.eos)
    if form.source_context is not None:
        return PrefixContinuation(tokens, form)
    check_length(tokens.split, len(tokens), form.context, str(tokens.path))
    return BestFit(tokens, form) if form.pads else NextToken(tokens, form)


class NextToken:
    """Row k predicts the ids from k * context on. The last row begins earlier, so that it is as long as the others,
    and what the row before has predicted does not count in it again."""

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form

    def __len__(self) -> int:
        return math.ceil(len(self._tokens) / self._form.context)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        context = self._form.context
        ids = np.empty((len(indices), context + 1), np.int64)
        last = len(self._tokens) - context
        for row, index in zip(ids, indices.tolist(), strict=True):
            self._tokens.read(min(index * context, last) - 1, row)
        tokens, targets, *doc_ids = self._form.batch(ids)
        if (overlap := indices * context - last).max(initial=0) > 0:
            targets = np.where(np.arange(context) < overlap[:, None], IGNORED, targets)
        return tokens, targets, *doc_ids


class BestFit:
    """Rows of whole documents; docs/data.md says how they are packed."""

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form
        starts, lengths = tokens.documents()
        parts: list[tuple[int, int]] = []
        ends = [0]
        last = np.empty(1, np.int64)
        tokens.read(len(tokens) - 1, last)
        if last[0] != tokens.eos:  # of a file that ends within a document: no eos would open the document beside it
            parts += [(s, min(form.context, len(tokens) - s)) for s in range(starts[-1], len(tokens), form.context)]
            ends += range(1, len(parts) + 1)
            starts, lengths = starts[:-1], lengths[:-1]
        for first in range(0, len(lengths), PACKED_TOGETHER):
            for row in best_fit(lengths[first : first + PACKED_TOGETHER].tolist(), form.context):
                parts += [(starts[first + part.document] + part.start, part.size) for part in row]
                ends.append(len(parts))
        self._parts, self._ends = np.array(parts, np.int64), np.array(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        ids = np.full((len(indices), self._form.context + 1), NOTHING, np.int64)
        for row, index in zip(ids, indices.tolist(), strict=True):
            filled = 0
            for start, size in self._parts[self._ends[index] : self._ends[index + 1]].tolist():
                # What is overwritten is the eos of the document before, by the same.
                self._tokens.read(start - 1, row[filled : filled + size + 1])
                filled += size
        return self._form.batch(ids)


class PrefixContinuation:
    """Row k is the beginning of a document: `source_context` tokens to read, then what follows, to be continued.

    Documents with less than one target are left out, the others are padded or cut to the row.
    """

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form
        source = form.source_context
        assert source is not None
        starts, lengths = tokens.documents()
        long_enough = lengths >= source + 2
        self._starts, self._lengths = starts[long_enough], np.minimum(lengths[long_enough], form.context + 1)
        if not len(self):
            raise DataError(
                f"{tokens.path}: no document of the {tokens.split} split has model.source_context + 2 = "
                f"{source + 2} tokens (the longest of {len(lengths):,} has {lengths.max(initial=0):,}); "
                "shorten model.source_context, or add longer documents"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        ids = np.full((len(indices), self._form.context + 1), NOTHING, np.int64)
        for row, index in zip(ids, indices.tolist(), strict=True):
            self._tokens.read(self._starts[index], row[: self._lengths[index]])
        return self._form.batch(ids)
