"""Streamed text, which is tokenized during training: its shards, its held-out documents, and its virtual streams.

A stream has documents in their order, and endless rows of ids made of them. The rows depend on the shards, the seed and
the stream alone. An epoch takes the shards in a shuffled order, and `open_shards` of them at a time are a window. The
documents of a window are cut into pieces, which are neighbours within a shard. The pieces are shuffled and dealt out to
the streams. So a stream needs the shards of one window at a time and no other stream's state, and every rank can read
it. A cursor is the beginning of its next row.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.data.cache_files import FileHashes, cache_directory, canonical_hash
from ngpt_train.data.dataset import Dataset, OnMain, Tokens, path_of
from ngpt_train.data.loader import Share
from ngpt_train.data.permutation import keyed_hash, keyed_order, permuted
from ngpt_train.data.rows import BestFit, RowFormat, check_length, row_format, tokens_for_targets
from ngpt_train.data.shard_cache import OpenShards, ShardCache
from ngpt_train.data.sources import open_source
from ngpt_train.data.sources.local_files import shards_of
from ngpt_train.data.sources.source import Shard, Source, draw_sample
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Ids, Ints, Tokenizer, with_eos

logger = logging.getLogger(__name__)

# Fewest pieces of a window for each stream, so that the streams differ by a fraction of a window only.
PIECES_PER_STREAM = 4
MOST_EMPTY_EPOCHS = 3
# Documents that best_fit packs together. They are in memory, and a resume tokenizes up to so many again.
PACKED_TOGETHER = 64


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


@dataclass(frozen=True)
class StreamSettings:
    """What decides the rows of all streams, besides the text and the tokenizer."""

    n_streams: int
    open_shards: int
    seed: int
    form: RowFormat

    def n_windows(self, n_shards: int) -> int:
        """Windows of an epoch."""
        return -(-n_shards // self.open_shards)

    def shards(self, n_shards: int, epoch: int, window: int) -> list[int]:
        """The shards of a window."""
        places = np.arange(window * self.open_shards, min((window + 1) * self.open_shards, n_shards))
        return permuted(places + epoch * n_shards, n_shards, self.seed).tolist()

    def pieces(self, sizes: Sequence[tuple[int, int]], epoch: int, window: int) -> list[Piece]:
        """All pieces of a window, shuffled. sizes: (shard, number of its documents)."""
        step = max(1, sum(n for _, n in sizes) // (self.n_streams * PIECES_PER_STREAM))
        pieces = [Piece(shard, first, min(first + step, n)) for shard, n in sizes for first in range(0, n, step)]
        return [pieces[i] for i in keyed_order(len(pieces), self.seed, epoch, window)]

    def first_place(self, stream: int, epoch: int, window: int) -> int:
        """The place of a stream's first piece in a window. The stream has every `n_streams`-th piece from there. Each
        window draws anew which stream has the very first piece, so that no stream is short of pieces in all."""
        return (stream - keyed_hash(self.seed, epoch, window)) % self.n_streams

    def document_order(self, piece: Piece, epoch: int) -> list[int]:
        """The documents of a piece in reading order, as numbers within the shard."""
        return [piece.first + i for i in keyed_order(piece.last - piece.first, self.seed, epoch, *piece)]


@dataclass(frozen=True)
class Start:
    """The start of all streams."""

    cursors: Ints  # (n_streams, 5)
    rows: Ints  # (n_streams,) given before
    skipped: dict[str, str]  # problems of left out shards, by name


@dataclass(frozen=True)
class StreamedText:
    """Text that is tokenized during training. Travels to worker processes."""

    cache: ShardCache
    shards: tuple[Shard, ...]
    val_fraction: float
    settings: StreamSettings
    tokenizer: Tokenizer

    def open(self, skipped: dict[str, str] | None = None) -> OpenShards:
        return OpenShards(self.cache, self.shards, self.val_fraction, self.settings.open_shards, skipped or {})

    def about_bytes(self) -> float:
        """An estimate of the bytes of all text, held-out text included. Fetches nothing. Decoded shards have a known
        size. The sizes of the others are scaled by the ratio of the decoded ones."""
        found = {shard: self.cache.bytes_if_here(shard) for shard in self.shards}
        decoded = {shard: n_bytes for shard, n_bytes in found.items() if n_bytes}  # without skipped shards
        size = sum(shard.size for shard in decoded)
        ratio = sum(decoded.values()) / size if size else 1.0
        return sum(ratio * shard.size if n_bytes is None else n_bytes for shard, n_bytes in found.items())

    def fetch(self, start: Start, share: Share) -> None:
        """Fetches and decodes the shards of a rank's first rows. Raises DataError."""
        text = self.open(start.skipped)
        for epoch, window in np.unique(start.cursors[share.streams(self.settings.n_streams), :2], axis=0).tolist():
            for shard in self.settings.shards(text.n_shards, epoch, window):
                text.n_documents(shard)


def open_streamed(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """Opens the text of `config.data`. Reads only the text of the validation split and of a tokenizer to train.

    The process of `on_main` lists the shards and reads the text. Raises DataError if a shard or the tokenizer is
    faulty, or if the held-out text is shorter than a row.
    """
    data = config.data
    source = on_main(lambda: list_shards(config))
    cache, text = open_text(config, source)
    if tokenizer is None:
        tokenizer = on_main(lambda: load_tokenizer(config.tokenizer, corpus=corpus_of(text)))
        assert tokenizer is not None
    known = tokenizer
    validation = on_main(lambda: _validation_tokens(config, text, known))
    settings = StreamSettings(data.streams, data.open_shards, config.run.seed, row_format(config, tokenizer.eos))
    streamed = StreamedText(cache, source.shards, data.val_fraction, settings, tokenizer)
    identity = {
        "tokenizer": tokenizer.fingerprint,
        "shards": [shard.identity for shard in source.shards],
        "text_field": data.read_field,
        "val_fraction": data.val_fraction,
    }
    manifest = {"source": {"kind": data.kind, "revision": source.revision, "shards": source.names}}
    return Dataset(streamed, validation, tokenizer, canonical_hash(identity), path_of(config), manifest)


def list_shards(config: Config) -> Source:
    """The source of the text with its shards in order."""
    source = open_source(config.data)
    hashes = FileHashes(cache_directory(config))
    source = replace(source, shards=shards_of(source, hashes))
    hashes.save()
    return source


def open_text(config: Config, source: Source) -> tuple[ShardCache, OpenShards]:
    """The cache, and the shards of the source in it."""
    data, directory = config.data, cache_directory(config) / "documents"
    cache = ShardCache(directory, data.cache_gb * 1e9, source.reader, data.read_field, data.on_bad_shard == "skip")
    return cache, OpenShards(cache, source.shards, data.val_fraction, data.open_shards, skipped={})


def corpus_of(text: OpenShards, share: float = 1.0) -> Iterator[str]:
    """Training text for a tokenizer: a share of the usual sample. It is drawn at the first read."""
    yield from draw_sample(text.shards, text.documents, text.val_fraction, share=share)[0]


def _validation_tokens(config: Config, text: OpenShards, tokenizer: Tokenizer) -> Tokens:
    """Held-out documents of the first shards, enough for eval.rows rows or eval.tokens targets.

    eval.rows reads at most data.open_shards shards, and more only if these have no row. eval.tokens may read all
    shards. If both are null, all are read. eval.contexts must not matter, because rows are drawn from these documents,
    and a longer text would have other rows.
    """
    form = row_format(config, tokenizer.eos)
    rows, wanted = config.eval.rows, tokens_for_targets(config)
    takes_all = rows is None and wanted is None
    ids: list[Ids] = []
    n_tokens = n_documents = n_targets = full = 0
    enough = False
    faulty: list[str] = []
    for shard in range(text.n_shards):
        if (problem := text.documents(shard).header["bad"]) is not None:
            faulty.append(problem)
        for document in text.held_out(shard):
            ids.append(with_eos(tokenizer, document))
            n_tokens += len(ids[-1])
            n_documents += len(ids[-1]) >= form.shortest
            n_targets += int(form.targets_of(np.array(len(ids[-1]))))
            full = (n_tokens - 1) // form.context if form.source_context is None else n_documents
            asked_for = (rows is None or full >= rows) and n_targets >= (wanted or 0)
            enough = asked_for and n_tokens > config.model.context and not takes_all
            if enough:
                break
        if enough or (rows is not None and full and shard + 1 >= config.data.open_shards):
            break
        if shard + 1 >= config.data.open_shards:
            logger.info("held-out text of %d of %d shards: %s tokens", shard + 1, text.n_shards, f"{n_tokens:,}")
    where = f"{path_of(config)}, streamed"
    if n_tokens == 0 and text.n_shards == 1:
        where += " (data.streaming=false cuts a single document in two)"
    if faulty:
        where += f" ({len(faulty)} left out as faulty, such as {faulty[0]})"
    check_length("validation", n_tokens, config.model.context, where)
    return Tokens.of_documents("validation", path_of(config), ids, tokenizer.eos)


# --- the streams


class Windows:
    """The pieces of the current windows, for all streams."""

    KEPT = 16  # windows; in a short text streams may be epochs apart

    def __init__(self, text: OpenShards, settings: StreamSettings) -> None:
        self.text, self.settings = text, settings
        self._pieces: dict[tuple[int, int], list[Piece]] = {}

    def pieces(self, epoch: int, window: int) -> list[Piece]:
        """All pieces of a window. Begins to fetch the shards of the next window."""
        if (epoch, window) not in self._pieces:
            sizes = [(shard, self.text.n_documents(shard)) for shard in self.shards(epoch, window)]
            if len(self._pieces) == self.KEPT:
                del self._pieces[min(self._pieces)]
            self._pieces[epoch, window] = self.settings.pieces(sizes, epoch, window)
            self.text.soon(self.shards(*self.after(epoch, window)))
        return self._pieces[epoch, window]

    def after(self, epoch: int, window: int) -> tuple[int, int]:
        """Epoch and window of the next window."""
        last = window + 1 == self.settings.n_windows(self.text.n_shards)
        return (epoch + 1, 0) if last else (epoch, window + 1)

    def shards(self, epoch: int, window: int) -> list[int]:
        return self.settings.shards(self.text.n_shards, epoch, window)


class Stream:
    """Stream number `stream`. windows: shared with other streams."""

    def __init__(self, windows: Windows, tokenizer: Tokenizer, stream: int) -> None:
        self.windows, self.tokenizer, self.stream = windows, tokenizer, stream
        self.text, self.settings = windows.text, windows.settings

    def rows(self, cursor: Cursor) -> Iterator[tuple[Ids, Cursor]]:
        """Rows of context + 1 ids from the cursor on, each with the cursor of the next row. Raises DataError."""
        form = self.settings.form
        if form.source_context is None:
            return self._packed(cursor) if form.pads else self._joined(cursor)
        # A row is the beginning of a document.
        documents = self.documents(cursor)
        return ((form.beginning(ids), place._replace(document=place.document + 1)) for place, ids in documents)

    def _joined(self, cursor: Cursor) -> Iterator[tuple[Ids, Cursor]]:
        """Documents one after the other. The last id of a row, a target, is also the first of the next, an input."""
        length = self.settings.form.context + 1
        row = np.empty(length, np.int32)
        filled = 0
        for place, ids in self.documents(cursor):
            taken = cursor.within if place[:4] == cursor[:4] else 0
            if filled == 0:
                row[0] = ids[taken - 1] if taken else self.settings.form.eos
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

    def _packed(self, cursor: Cursor) -> Iterator[tuple[Ids, Cursor]]:
        """Whole documents, packed PACKED_TOGETHER at a time. Documents of two epochs are not packed together."""
        form = self.settings.form
        group: list[Ids] = []
        skip = cursor.within
        start = cursor
        for place, ids in self.documents(cursor):
            if len(group) == PACKED_TOGETHER or (group and place.epoch > start.epoch):
                packed = BestFit(Tokens.of_documents("train", Path(), group, form.eos), form)
                for number in range(skip, len(packed)):
                    last = number + 1 == len(packed)
                    yield packed.ids(number), place if last else start._replace(within=number + 1)
                group, skip = [], 0
            if not group:
                start = place
            group.append(ids)

    def pieces(self, cursor: Cursor) -> Iterator[tuple[Cursor, Piece]]:
        """The stream's pieces from the cursor's piece on, in one epoch after the other."""
        epoch, window, skip = cursor[:3]
        last = epoch  # the last epoch with a piece for this stream
        while True:
            self._check_epochs(last, epoch)
            first = self.settings.first_place(self.stream, epoch, window)
            mine = self.windows.pieces(epoch, window)[first :: self.settings.n_streams]
            for index in range(skip, len(mine)):
                last = epoch
                yield Cursor(epoch, window, index), mine[index]
            (epoch, window), skip = self.windows.after(epoch, window), 0

    def documents(self, cursor: Cursor) -> Iterator[tuple[Cursor, Ids]]:
        """(beginning, ids with eos at their end) of each training document from the cursor's document on. Documents too
        short for a row are left out. Raises DataError if there are none for this stream."""
        shortest = self.settings.form.shortest
        kind = f" of {shortest} tokens (model.source_context + 2)" if shortest else ""
        last = cursor.epoch  # the last epoch with a document for this stream
        for place, piece in self.pieces(cursor):
            self._check_epochs(last, place.epoch, kind)
            order = self.settings.document_order(piece, place.epoch)
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
                f"{self.text.shards[shard].name}, document {index} of those with text: the tokenizer "
                f"{self.tokenizer.name} fails on it ({type(error).__name__}: {error}). Correct or remove the document"
            ) from error

    def _check_epochs(self, last: int, epoch: int, kind: str = "") -> None:
        """Raises DataError after too many epochs without a document. With few documents one such epoch is normal."""
        if epoch > last + MOST_EMPTY_EPOCHS:
            raise DataError(
                f"data.streams={self.settings.n_streams}: in {MOST_EMPTY_EPOCHS} epochs there is no document{kind} for "
                f"stream {self.stream}. Take fewer streams, or more documents"
            )
