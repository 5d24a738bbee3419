"""A virtual stream: its documents in their order, and the endless rows of ids made of them.

The rows depend on the shards, the seed and the stream alone. An epoch takes the shards in a shuffled order, and
`open_shards` of them at a time are a window. The documents of a window are cut into pieces, which are neighbours within
a shard. The pieces are shuffled and dealt out to the streams. So a stream needs the shards of one window at a time and
no other stream's state, and every rank can read it. A cursor is the beginning of its next row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ngpt_train.core.errors import DataError
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.permutation import keyed_hash, keyed_order, permuted
from ngpt_train.data.rows import BestFit, RowFormat
from ngpt_train.data.shard_cache import OpenShards
from ngpt_train.data.tokenizers.tokenizer import Ids, Tokenizer, with_eos

# Fewest pieces of a window for each stream, so that the streams differ by a fraction of a window only.
PIECES_PER_STREAM = 4
MOST_EMPTY_EPOCHS = 3
# Documents that best_fit packs together. They are in memory, and a resume tokenizes up to so many again.
STREAMED_TOGETHER = 64


class Cursor(NamedTuple):
    """The beginning of a stream's next row."""

    epoch: int = 0
    window: int = 0
    piece: int = 0  # of the stream's pieces in the window
    document: int = 0  # of the piece
    within: int = 0  # the row's first target, an id of the document; for best_fit the row within the packed documents


class Piece(NamedTuple):
    """Documents `first` to `last - 1` of a shard."""

    shard: int
    first: int
    last: int


def n_windows(n_shards: int, open_shards: int) -> int:
    """Windows of an epoch."""
    return -(-n_shards // open_shards)


def window_shards(n_shards: int, open_shards: int, epoch: int, window: int, seed: int) -> list[int]:
    """The numbers of the shards of a window."""
    places = np.arange(window * open_shards, min((window + 1) * open_shards, n_shards))
    return permuted(places + epoch * n_shards, n_shards, seed).tolist()


def window_pieces(sizes: Sequence[tuple[int, int]], n_streams: int, epoch: int, window: int, seed: int) -> list[Piece]:
    """All pieces of a window, shuffled. sizes: (shard, number of its documents)."""
    step = max(1, sum(n for _, n in sizes) // (n_streams * PIECES_PER_STREAM))
    pieces = [Piece(shard, first, min(first + step, n)) for shard, n in sizes for first in range(0, n, step)]
    return [pieces[i] for i in keyed_order(len(pieces), seed, epoch, window)]


def first_place(n_streams: int, stream: int, epoch: int, window: int, seed: int) -> int:
    """The place of a stream's first piece in a window. The stream has every `n_streams`-th piece from there.

    Each window draws anew which stream has the very first piece, so that no stream is short of pieces in all windows.
    """
    return (stream - keyed_hash(seed, epoch, window)) % n_streams


def document_order(piece: Piece, epoch: int, seed: int) -> list[int]:
    """The documents of a piece in reading order, as numbers within the shard."""
    return [piece.first + i for i in keyed_order(piece.last - piece.first, seed, epoch, *piece)]


@dataclass(frozen=True)
class StreamSettings:
    """The settings that decide the rows of all streams, besides the text and the tokenizer."""

    n_streams: int
    open_shards: int
    seed: int
    form: RowFormat


class Windows:
    """The pieces of the current windows, for all streams."""

    KEPT = 16  # windows; in a short text streams may be epochs apart

    def __init__(self, text: OpenShards, settings: StreamSettings) -> None:
        self.text, self.settings = text, settings
        self._pieces: dict[tuple[int, int], list[Piece]] = {}

    def pieces(self, epoch: int, window: int) -> list[Piece]:
        """All pieces of a window. Begins to fetch the shards of the next window."""
        if (epoch, window) not in self._pieces:
            sizes = [(shard, self.text.n_documents(shard)) for shard in self._shards(epoch, window)]
            if len(self._pieces) == self.KEPT:
                del self._pieces[min(self._pieces)]
            settings = self.settings
            self._pieces[epoch, window] = window_pieces(sizes, settings.n_streams, epoch, window, settings.seed)
            self.text.soon(self._shards(*self.after(epoch, window)))
        return self._pieces[epoch, window]

    def after(self, epoch: int, window: int) -> tuple[int, int]:
        """Epoch and window of the next window."""
        last = window + 1 == n_windows(self.text.n_shards, self.settings.open_shards)
        return (epoch + 1, 0) if last else (epoch, window + 1)

    def _shards(self, epoch: int, window: int) -> list[int]:
        return window_shards(self.text.n_shards, self.settings.open_shards, epoch, window, self.settings.seed)


class Stream:
    """Stream number `stream`. windows: shared with other streams."""

    def __init__(self, windows: Windows, tokenizer: Tokenizer, stream: int) -> None:
        self.windows, self.tokenizer, self.stream = windows, tokenizer, stream
        self.text, self.settings = windows.text, windows.settings

    def rows(self, cursor: Cursor) -> Iterator[tuple[Ids, Cursor]]:
        """Rows of context + 1 ids from the cursor on, each with the cursor of the next row. Raises DataError."""
        return rows_of_stream(self.documents(cursor), cursor, self.settings.form)

    def pieces(self, cursor: Cursor) -> Iterator[tuple[Cursor, Piece]]:
        """The stream's pieces from the cursor's piece on, in one epoch after the other."""
        settings = self.settings
        epoch, window, skip = cursor.epoch, cursor.window, cursor.piece
        last = epoch  # the last epoch with a piece for this stream
        while True:
            self._check_epochs(last, epoch)
            place = first_place(settings.n_streams, self.stream, epoch, window, settings.seed)
            mine = self.windows.pieces(epoch, window)[place :: settings.n_streams]
            for index in range(skip, len(mine)):
                last = epoch
                yield Cursor(epoch, window, index), mine[index]
            (epoch, window), skip = self.windows.after(epoch, window), 0

    def documents(self, cursor: Cursor) -> Iterator[tuple[Cursor, Ids]]:
        """(beginning, ids with eos at their end) of each training document from the cursor's document on.

        Documents too short for a row are left out. Raises DataError if there are none for this stream.
        """
        shortest = self.settings.form.shortest
        kind = f" of {shortest} tokens (model.source_context + 2)" if shortest else ""
        last = cursor.epoch  # the last epoch with a document for this stream
        for place, piece in self.pieces(cursor):
            self._check_epochs(last, place.epoch, kind)
            order = document_order(piece, place.epoch, self.settings.seed)
            first = cursor.document if place[:3] == cursor[:3] else 0
            for index in range(first, len(order)):
                text = self.text.document(piece.shard, order[index])
                ids = None if text is None else self._encode(text, piece.shard, order[index])
                if ids is not None and len(ids) >= shortest:
                    last = place.epoch
                    yield place._replace(document=index), ids

    def _encode(self, text: str, shard: int, index: int) -> Ids:
        try:
            return with_eos(self.tokenizer, text)
        except Exception as error:  # any error of the tokenizer's library
            raise DataError(
                f"{self.text.name(shard)}, document {index} of those with text: the tokenizer {self.tokenizer.name} "
                f"fails on it ({type(error).__name__}: {error}). Correct or remove the document"
            ) from error

    def _check_epochs(self, last: int, epoch: int, kind: str = "") -> None:
        """Raises DataError after too many epochs without a document. With few documents one such epoch is normal."""
        if epoch > last + MOST_EMPTY_EPOCHS:
            raise DataError(
                f"data.streams={self.settings.n_streams}: in {MOST_EMPTY_EPOCHS} epochs there is no document{kind} for "
                f"stream {self.stream}. Take fewer streams, or more documents"
            )


# --- its rows


def rows_of_stream(
    documents: Iterable[tuple[Cursor, Ids]], cursor: Cursor, form: RowFormat
) -> Iterator[tuple[Ids, Cursor]]:
    """Rows of context + 1 ids from `cursor` on, each with the cursor of the next row.

    documents: from the cursor's document on, as (beginning, ids with eos at their end). A prefix row takes a whole
    document, so each has `form.shortest` ids at least.
    """
    if form.source_context is not None:
        return ((form.beginning(ids), place._replace(document=place.document + 1)) for place, ids in documents)
    return _packed(documents, cursor, form) if form.pads else _joined(documents, cursor, form)


def _joined(documents: Iterable[tuple[Cursor, Ids]], cursor: Cursor, form: RowFormat) -> Iterator[tuple[Ids, Cursor]]:
    """Documents one after the other. The last id of a row is also the first of the next: a target, then an input."""
    length = form.context + 1
    row = np.empty(length, np.int32)
    filled = 0
    for place, ids in documents:
        taken = cursor.within if place[:4] == cursor[:4] else 0
        if filled == 0:
            row[0] = ids[taken - 1] if taken else form.eos
            filled = 1
        while filled + len(ids) - taken >= length:
            end = taken + length - filled
            row[filled:] = ids[taken:end]
            taken = end
            yield row.copy(), place._replace(within=taken)
            row[0] = ids[taken - 1]
            filled = 1
        row[filled : filled + len(ids) - taken] = ids[taken:]
        filled += len(ids) - taken


def _packed(documents: Iterable[tuple[Cursor, Ids]], cursor: Cursor, form: RowFormat) -> Iterator[tuple[Ids, Cursor]]:
    """Whole documents, packed STREAMED_TOGETHER at a time. Documents of two epochs are not packed together."""
    group: list[Ids] = []
    skip = cursor.within
    start = cursor
    for place, ids in documents:
        if len(group) == STREAMED_TOGETHER or (group and place.epoch > start.epoch):
            packed = BestFit(Tokens.of_documents("train", Path(), group, form.eos), form)
            for number in range(skip, len(packed)):
                last = number + 1 == len(packed)
                yield packed.ids(number), place if last else start._replace(within=number + 1)
            group, skip = [], 0
        if not group:
            start = place
        group.append(ids)
