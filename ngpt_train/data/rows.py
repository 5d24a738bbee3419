"""What a training row is: a stretch of text, documents that fit together, or a document and its continuation.

A row is written as `context + 1` ids, -1 where there is none: each id but the last is read, each but the first is the
target of the one before. A document is its ids and then eos, and the eos before it opens it: as a target eos
ends one document, as an input it begins the next. So every id of every document is a target, its eos included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED, PADDING
from ngpt_train.core.errors import DataError
from ngpt_train.data.prepared.shards import Tokens, check_length

Batch = tuple[NDArray[np.int64], ...]  # tokens, targets and, where the model needs them, document ids: (N, context)
NOTHING = -1  # in place of an id where a row is padded
# Documents of prepared shards that best_fit packs together: more waste no less, and packing takes longer.
PACKED_TOGETHER = 4096


@dataclass(frozen=True)
class RowFormat:
    """How the ids of a row become what a model takes.

    source_context: tokens that an encoder reads, None for a decoder; pads: whether a row may have fewer ids than fit;
    document_mask: whether attention ends, and positions begin, with each document.
    """

    context: int
    eos: int
    pads: bool = False
    document_mask: bool = False
    source_context: int | None = None

    @property
    def shortest(self) -> int:
        """Ids of the shortest document that is a row: the source, a token that opens the target, and a target."""
        return 0 if self.source_context is None else self.source_context + 2

    def targets_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Targets that documents of `lengths` ids (N,), eos counted, have: (N,)."""
        if self.source_context is None:
            return lengths
        return np.maximum(np.minimum(lengths, self.context + 1) - self.source_context - 1, 0)

    def batch(self, ids: NDArray[np.integer]) -> Batch:
        """ids: (N, context + 1)."""
        wide: NDArray[np.int64] = ids.astype(np.int64, copy=False)
        tokens, targets = wide[:, :-1], wide[:, 1:]
        if self.source_context is not None:
            # The first token after the source is given to the decoder and never a target, as the TnT authors train.
            predicted = (np.arange(self.context) >= self.source_context) & (targets != NOTHING)
            doc_ids = np.where(tokens != NOTHING, 0, PADDING)
            return np.maximum(tokens, 0), np.where(predicted, targets, IGNORED), doc_ids
        read = targets != NOTHING  # an eos that nothing follows opens no document
        if self.pads:
            tokens, targets = np.where(read, tokens, 0), np.where(read, targets, IGNORED)
        if not self.document_mask:
            return tokens, targets
        doc_ids = (tokens == self.eos).cumsum(axis=1)
        return tokens, targets, np.where(read, doc_ids, PADDING) if self.pads else doc_ids


def row_format(config: Config, eos: int) -> RowFormat:
    """The format that the config asks for."""
    model, data = config.model, config.data
    source = model.source_length(model.context)
    return RowFormat(model.context, eos, data.pack == "best_fit", data.document_mask, source or None)


class Reader:
    """This rank's rows of one source. A reader without streams needs `take` alone."""

    def take(self, numbers: NDArray[np.int64]) -> Batch:
        """Rows `numbers` (N,) of the source, which are the next ones of this rank."""
        raise NotImplementedError

    def cursors(self) -> dict[str, NDArray[np.int64]]:
        """Where each stream goes on after the rows taken so far, (n_streams, width); -1 for streams of other ranks."""
        return {}

    def skipped(self) -> dict[str, str]:
        """What is wrong with shards that were left out, by name."""
        return {}

    def rows_by_source(self) -> dict[str, int]:
        """Of a mixture, the rows of each source so far; the sums over all ranks are those of the run."""
        return {}

    def close(self) -> None:
        """Ends the processes that read ahead."""


class Share(NamedTuple):
    """Which rows of the run, and so which virtual streams, are those of rank `rank` of `world_size`."""

    rank: int
    world_size: int

    def step(self, n_streams: int) -> int:
        """The rank reads every so many-th stream, and so its streams have every so many-th row of the run."""
        return math.gcd(self.world_size, n_streams)

    def streams(self, n_streams: int) -> range:
        """The streams that the rank reads, alone or with others."""
        step = self.step(n_streams)
        return range(self.rank % step, n_streams, step)

    def next_row(self, rows: int, step: int) -> int:
        """The first row from `rows` on that is `rank` modulo `step`."""
        return rows + (self.rank - rows) % step


class Rows(Protocol):
    """Numbered rows of `context` tokens each."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        """Rows `indices` (N,)."""
        ...


def rows_of(tokens: Tokens, config: Config) -> Rows:
    """The rows that the config's model is trained on. Raises DataError if the split has none."""
    return _rows_of(tokens, row_format(config, tokens.eos))


@functools.lru_cache(maxsize=2)  # both splits: to pack the documents of a large one takes minutes
def _rows_of(tokens: Tokens, form: RowFormat) -> Rows:
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
        if last[0] != tokens.eos:
            # The last document lacks the eos that would open another one after it: it has rows of its own.
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
                # What opens a further document is there: the eos of the one before it in the row.
                opens = int(not filled)
                self._tokens.read(start - opens, row[filled + 1 - opens : filled + size + 1])
                filled += size
        return self._form.batch(ids)


class PrefixContinuation:
    """Row k is the beginning of a document: `source_context` tokens to read, then what follows, to be continued.

    Documents with less than one target are left out, the others are padded or cut to the row.
    """

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form
        starts, lengths = tokens.documents()
        long_enough = lengths >= form.shortest
        self._starts, self._lengths = starts[long_enough], np.minimum(lengths[long_enough], form.context + 1)
        if not len(self):
            raise DataError(
                f"{tokens.path}: no document of the {tokens.split} split has model.source_context + 2 = "
                f"{form.shortest} tokens (the longest of {len(lengths):,} has {lengths.max(initial=0):,}); "
                "shorten model.source_context, or add longer documents"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        ids = np.full((len(indices), self._form.context + 1), NOTHING, np.int64)
        for row, index in zip(ids, indices.tolist(), strict=True):
            self._tokens.read(self._starts[index], row[: self._lengths[index]])
        return self._form.batch(ids)


class Span(NamedTuple):
    """Ids `start` to `start + size - 1` of a document, eos counted, as targets of a row."""

    document: int
    start: int
    size: int


def best_fit(lengths: Sequence[int], context: int) -> list[list[Span]]:
    """Rows of at most `context` targets that hold documents of `lengths` ids, eos counted, each id once.

    Largest first, each into the row that it leaves the least room in. A document longer than a row fills rows of its
    own. What is left of it stands first in another row, because there the id before it can be the first input;
    documents further on are opened by the eos of the one before.
    """
    rows: list[list[Span]] = []
    rests: list[Span] = []
    whole: list[Span] = []
    for document, length in enumerate(lengths):
        cut = length // context * context
        rows += [[Span(document, start, context)] for start in range(0, cut, context)]
        if cut < length:
            (rests if cut else whole).append(Span(document, cut, length - cut))
    with_room: dict[int, list[int]] = {}  # rows by their free room
    rooms = 0  # bit r is set where a row has room r

    def put(part: Span, row: int, room: int) -> None:
        nonlocal rooms
        rows[row].append(part)
        if left := room - part.size:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left

    def new_row() -> int:
        rows.append([])
        return len(rows) - 1

    for part in rests:
        put(part, new_row(), context)
    for part in sorted(whole, key=lambda part: -part.size):
        fitting = rooms >> part.size
        if not fitting:
            put(part, new_row(), context)
            continue
        room = part.size + (fitting & -fitting).bit_length() - 1  # the smallest
        row = with_room[room].pop()
        if not with_room[room]:
            rooms ^= 1 << room
        put(part, row, room)
    return rows
