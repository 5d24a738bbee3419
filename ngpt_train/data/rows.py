"""Rows of text: a stretch of it, documents that fit together, a document's beginning; and of examples with a label.

A row has `context + 1` ids, -1 for padding. Each id but the last is an input, each but the first is the target of the
input before it. A document is its ids and then eos. The eos of the document before opens it: as a target eos ends a
document, as an input it begins the next. So every id of every document is a target, its eos included.

`rows_of` numbers the rows of a split, and `chosen_rows` draws the validation rows among them. `streamed_text.Stream`
makes the rows of an endless sequence of documents.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED, PADDING
from ngpt_train.core.errors import DataError
from ngpt_train.data.dataset import Dataset, Examples, Pairs, Tokens
from ngpt_train.data.masks import Masks, masks_of
from ngpt_train.data.pair_rows import PairRows
from ngpt_train.data.permutation import permuted
from ngpt_train.data.tokenizers.tokenizer import Ids, Ints, Tokenizer

Batch = tuple[Ints, ...]  # tokens, targets and, if the model needs them, document ids: (N, context)
NOTHING = -1  # an id of padding
# Documents that best_fit packs together. More would take longer and waste as much.
PREPARED_TOGETHER = 4096
# Not run.seed, so that runs with different seeds are measured on the same text.
VALIDATION_SEED = 0
# eval.tokens chooses text in blocks of so many tokens. The usual contexts divide a block, so all cut the same text.
BLOCK_TOKENS = 16_384
COUNTED_TOGETHER = 1024  # rows


@dataclass(frozen=True)
class RowFormat:
    """Turns the ids of rows into the arrays that a model takes."""

    context: int
    eos: int
    pads: bool = False  # True if a row may have fewer ids than fit
    document_mask: bool = False  # True if attention ends, and positions begin, with each document
    source_context: int | None = None  # tokens of the encoder, None for a decoder

    @property
    def shortest(self) -> int:
        """Ids of the shortest document that makes a row: the source, the decoder's first token, and a target."""
        return 0 if self.source_context is None else self.source_context + 2

    def targets_of(self, lengths: Ints) -> Ints:
        """The numbers of targets (N,) in documents of `lengths` ids (N,), eos included."""
        if self.source_context is None:
            return lengths
        return np.maximum(np.minimum(lengths, self.context + 1) - self.source_context - 1, 0)

    def beginning(self, ids: Ids) -> Ids:
        """The row of a document, cut or padded: (context + 1,)."""
        row = np.full(self.context + 1, NOTHING, np.int32)
        row[: len(ids)] = ids[: self.context + 1]
        return row

    def batch(self, ids: Ids) -> Batch:
        """ids: (N, context + 1)."""
        wide: Ints = ids.astype(np.int64, copy=False)
        tokens, targets = wide[:, :-1], wide[:, 1:]
        if self.source_context is not None:
            # The first token after the source is an input of the decoder and never a target, as the TnT authors train.
            predicted = (np.arange(self.context) >= self.source_context) & (targets != NOTHING)
            doc_ids = np.where(tokens != NOTHING, 0, PADDING)
            return np.maximum(tokens, 0), np.where(predicted, targets, IGNORED), doc_ids
        read = targets != NOTHING  # a last eos opens no document
        if self.pads:
            tokens, targets = np.where(read, tokens, 0), np.where(read, targets, IGNORED)
        if not self.document_mask:
            return tokens, targets
        doc_ids = (tokens == self.eos).cumsum(axis=1)
        return tokens, targets, np.where(read, doc_ids, PADDING) if self.pads else doc_ids


def row_format(config: Config, eos: int) -> RowFormat:
    model, data = config.model, config.data
    source = model.source_length(model.context)
    return RowFormat(model.context, eos, data.pack == "best_fit", data.document_mask, source or None)


# --- the rows of a split, by their numbers


class Rows(Protocol):
    """Numbered rows of `context` tokens each."""

    def __len__(self) -> int: ...

    def batch(self, indices: Ints) -> Batch:
        """Rows `indices` (N,)."""
        ...


def rows_of(tokens: Tokens, config: Config) -> Rows:
    """The rows of a split for the config's model. Raises DataError if there are none."""
    if isinstance(tokens, Examples):
        return LabelRows(tokens, config)
    if isinstance(tokens, Pairs):
        return PairRows(tokens)
    return _rows_of(tokens, row_format(config, tokens.eos))


def held_out_rows(tokens: Tokens, tokenizer: Tokenizer, config: Config) -> Rows:
    """The rows of a split as a validation reads them. Raises DataError if there are none."""
    rows, masks = rows_of(tokens, config), masks_of(config, tokenizer)
    return rows if masks is None else MaskedRows(rows, masks)


def with_rows(dataset: Dataset, config: Config) -> Dataset:
    """Prepared text, after a check that both splits have rows. Raises DataError."""
    for split in (dataset.train, dataset.validation):
        assert isinstance(split, Tokens)
        rows_of(split, config)
    return dataset


@functools.lru_cache(maxsize=2)  # both splits: to pack a large split takes minutes
def _rows_of(tokens: Tokens, form: RowFormat) -> Rows:
    if form.source_context is not None:
        return PrefixContinuation(tokens, form)
    check_length(tokens.split, len(tokens), form.context, str(tokens.path))
    return BestFit(tokens, form) if form.pads else NextToken(tokens, form)


def check_length(split: str, n_tokens: int, context: int, where: str) -> None:
    """Raises DataError if `n_tokens` is less than one row, `context` + 1."""
    change = "raise data.val_fraction (`evaluate` takes 1)" if split == "validation" else "lower data.val_fraction"
    if n_tokens < context + 1:
        raise DataError(
            f"{where}: the {split} split has {n_tokens} tokens, less than one row (model.context + 1 = {context + 1}); "
            f"add text, shorten model.context or {change}"
        )


class NextToken:
    """Row k predicts the ids from k * context on. The last row begins earlier, so that it is as long as the others. It
    ignores the targets of the row before."""

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form

    def __len__(self) -> int:
        return math.ceil(len(self._tokens) / self._form.context)

    def batch(self, indices: Ints) -> Batch:
        context = self._form.context
        ids = np.empty((len(indices), context + 1), np.int64)
        last = len(self._tokens) - context
        for row, index in zip(ids, indices.tolist(), strict=True):
            self._tokens.read(min(index * context, last) - 1, row)
        tokens, targets, *doc_ids = self._form.batch(ids)
        if (overlap := indices * context - last).max(initial=0) > 0:
            targets = np.where(np.arange(context) < overlap[:, None], IGNORED, targets)
        return tokens, targets, *doc_ids


class Span(NamedTuple):
    """Ids `start` to `start + size - 1` of a document, eos included, as targets of a row."""

    document: int
    start: int
    size: int


def best_fit(lengths: Sequence[int], context: int) -> list[list[Span]]:
    """Packs documents of `lengths` ids, eos included, into rows of at most `context` targets, each id once.

    The largest document comes first, and each goes into the row with the least sufficient room. A document longer than
    a row fills rows of its own. Its rest stands first in another row, because only there the id before it can be the
    first input. The eos of the document before opens any other document.
    """
    rows: list[list[Span]] = []
    rests: list[Span] = []
    whole: list[Span] = []
    for document, length in enumerate(lengths):
        cut = length // context * context
        rows += [[Span(document, start, context)] for start in range(0, cut, context)]
        if cut < length:
            (rests if cut else whole).append(Span(document, cut, length - cut))
    with_room: dict[int, list[int]] = {}  # with_room[room]: rows
    rooms = 0  # bit r is set if a row has room r
    for part in [*rests, *sorted(whole, key=lambda part: -part.size)]:
        fitting = 0 if part.start else rooms >> part.size  # a rest begins a row
        if fitting:
            room = part.size + (fitting & -fitting).bit_length() - 1  # the smallest
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(part)
        if left := room - part.size:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows


class BestFit:
    """Rows of whole documents, as `best_fit` packs them."""

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form
        starts, lengths = tokens.documents
        parts: list[tuple[int, int]] = []
        ends = [0]
        if tokens.ids(len(tokens) - 1, 1)[0] != tokens.eos:
            # The last document has no eos to open another document after it, so it has rows of its own.
            parts += [(s, min(form.context, len(tokens) - s)) for s in range(starts[-1], len(tokens), form.context)]
            ends += range(1, len(parts) + 1)
            starts, lengths = starts[:-1], lengths[:-1]
        for first in range(0, len(lengths), PREPARED_TOGETHER):
            for row in best_fit(lengths[first : first + PREPARED_TOGETHER].tolist(), form.context):
                parts += [(starts[first + part.document] + part.start, part.size) for part in row]
                ends.append(len(parts))
        self._parts, self._ends = np.array(parts, np.int64), np.array(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def ids(self, index: int) -> Ids:
        """Row `index`: (context + 1,)."""
        row = np.full(self._form.context + 1, NOTHING, np.int32)
        filled = 0
        for start, size in self._parts[self._ends[index] : self._ends[index + 1]].tolist():
            # The eos of the document before in the row opens a further document.
            opens = int(not filled)
            self._tokens.read(start - opens, row[filled + 1 - opens : filled + size + 1])
            filled += size
        return row

    def batch(self, indices: Ints) -> Batch:
        return self._form.batch(np.stack([self.ids(index) for index in indices.tolist()]))


class PrefixContinuation:
    """Row k is the beginning of a document: `source_context` tokens for the encoder, then the continuation. Documents
    without a target are left out, the others are padded or cut to the row."""

    def __init__(self, tokens: Tokens, form: RowFormat) -> None:
        self._tokens, self._form = tokens, form
        starts, lengths = tokens.documents
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

    def batch(self, indices: Ints) -> Batch:
        documents = (self._tokens.ids(self._starts[index], self._lengths[index]) for index in indices.tolist())
        return self._form.batch(np.stack([self._form.beginning(ids) for ids in documents]))


class LabelRows:
    """Row k is example k: eos and its texts with eos behind each, padded to model.context, so that records count what
    is computed; of an example that is too long the longest text is cut.

    The target is the label, at the place that has read all: the last token of a decoder, the first of a bidirectional
    model, the decoder's first token, eos, of an encoder-decoder.
    """

    def __init__(self, examples: Examples, config: Config) -> None:
        model, self._examples = config.model, examples
        self._context, self._source = model.context, model.source_length(model.context)
        self._reads_first = model.bidirectional

    def __len__(self) -> int:
        return len(self._examples.labels)

    def batch(self, indices: Ints) -> Batch:
        """Tokens, targets and document ids, each (N, context)."""
        shape = len(indices), self._context
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        doc_ids = np.full(shape, PADDING, np.int64)
        for row, index in enumerate(indices.tolist()):
            ids = joined(self._examples.texts[index], self._examples.eos, self._source or self._context)
            tokens[row, : len(ids)] = ids
            doc_ids[row, : len(ids)] = 0
            place = 0 if self._reads_first else len(ids) - 1
            if self._source:
                place = self._source
                tokens[row, place], doc_ids[row, place] = self._examples.eos, 0
            targets[row, place] = self._examples.labels[index]
        return tokens, targets, doc_ids


def joined(texts: Sequence[Ids], eos: int, most: int) -> Ints:
    """eos and the texts with eos behind each, at most `most` ids: the longest text is cut."""
    lengths = [len(ids) for ids in texts]
    while 1 + sum(lengths) + len(lengths) > most:
        lengths[int(np.argmax(lengths))] -= 1
    parts = [np.array([eos])]
    for ids, length in zip(texts, lengths, strict=True):
        parts += [ids[:length], np.array([eos])]
    return np.concatenate(parts).astype(np.int64)


@dataclass(frozen=True)
class MaskedRows:
    """The rows of a split, each with a mask that stays."""

    rows: Rows
    masks: Masks

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Ints) -> Batch:
        return self.masks.of(self.rows.batch(indices), indices, VALIDATION_SEED)


# --- the validation rows
#
# A seeded choice among the rows of the held-out text. It depends on the text, the context and eval.rows or eval.tokens.
# It never depends on the model, its seed or the number of ranks. Indices are in the seeded order, and the first n are
# the choice of n rows.


def chosen_rows(rows: Rows, config: Config) -> Ints:
    """eval.rows rows, or enough rows for eval.tokens targets. All rows if there are fewer, or if both keys are null.

    eval.rows draws rows one by one. eval.tokens draws blocks of BLOCK_TOKENS of running text, but rows that are
    documents one by one.
    """
    total, wanted = len(rows), tokens_for_targets(config)
    if wanted is None:
        return permuted(np.arange(min(config.eval.rows or total, total)), total, VALIDATION_SEED)
    block = max(1, BLOCK_TOKENS // config.model.context) if isinstance(rows, NextToken) else 1
    n_blocks = -(-total // block)
    firsts = permuted(np.arange(n_blocks), n_blocks, VALIDATION_SEED) * block
    order = (firsts[:, None] + np.arange(block)).ravel()
    order = order[order < total]  # the last block of the text may be shorter
    return order[: _enough(rows, order, wanted)]


def tokens_for_targets(config: Config) -> int | None:
    """eval.tokens; of masked rows the tokens that have so many targets on average."""
    wanted, model = config.eval.tokens, config.model
    return wanted if wanted is None or model.objective != "masked" else math.ceil(wanted / model.mask_share)


def _enough(rows: Rows, order: Ints, n_targets: int) -> int:
    """The least n such that the first n rows of `order` have `n_targets` targets; all if they have fewer."""
    for first in range(0, len(order), COUNTED_TOGETHER):
        _, targets, *_ = rows.batch(order[first : first + COUNTED_TOGETHER])
        counts = (targets != IGNORED).sum(axis=1).cumsum()
        if counts[-1] >= n_targets:
            return first + int(np.searchsorted(counts, n_targets)) + 1
        n_targets -= int(counts[-1])
    return len(order)


def same_text(chosen: Ints, context: int, other: int, n_other: int) -> Ints:
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
