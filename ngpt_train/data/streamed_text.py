"""Streamed text, which is tokenized during training: its shards, held-out documents, and the start of its streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.data.cache_files import FileHashes, cache_directory, canonical_hash
from ngpt_train.data.dataset import Dataset, OnMain, Tokens, path_of
from ngpt_train.data.loader import Share
from ngpt_train.data.rows import check_length, row_format
from ngpt_train.data.shard_cache import OpenShards, ShardCache
from ngpt_train.data.sources import open_source
from ngpt_train.data.sources.local_files import shards_of
from ngpt_train.data.sources.source import Shard, Source, draw_sample
from ngpt_train.data.stream import StreamSettings, window_shards
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer, with_eos

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamedText:
    """Text that is tokenized during training. Travels to worker processes."""

    cache: ShardCache
    shards: tuple[Shard, ...]
    val_fraction: float
    settings: StreamSettings
    tokenizer: Tokenizer

    def open(self, skipped: Mapping[str, str] | None = None) -> OpenShards:
        return OpenShards(self.cache, self.shards, self.val_fraction, self.settings.open_shards, skipped or {})

    def about_bytes(self) -> float:
        """An estimate of the bytes of all text, held-out text included. Fetches nothing.

        Decoded shards have a known size. The sizes of the others are scaled by the ratio of the decoded ones.
        """
        found = {shard: self.cache.bytes_if_here(shard) for shard in self.shards}
        decoded = {shard: n_bytes for shard, n_bytes in found.items() if n_bytes}  # without skipped shards
        size = sum(shard.size for shard in decoded)
        ratio = sum(decoded.values()) / size if size else 1.0
        return sum(ratio * shard.size if n_bytes is None else n_bytes for shard, n_bytes in found.items())

    def fetch(self, start: Start, share: Share) -> None:
        """Fetches and decodes the shards of a rank's first rows. Raises DataError."""
        settings, text = self.settings, self.open(start.skipped)
        for epoch, window in np.unique(start.cursors[share.streams(settings.n_streams), :2], axis=0).tolist():
            for shard in window_shards(text.n_shards, settings.open_shards, epoch, window, settings.seed):
                text.n_documents(shard)


@dataclass(frozen=True)
class Start:
    """The start of all streams."""

    cursors: NDArray[np.int64]  # (n_streams, 5)
    rows: NDArray[np.int64]  # (n_streams,) given before
    skipped: dict[str, str]  # problems of left out shards, by name


def open_streamed(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """Opens the text of `config.data`. Reads only the text of the validation split and of a tokenizer to train.

    The process of `on_main` lists the shards and reads the text. Raises DataError if a shard or the tokenizer is
    faulty, or if the held-out text is shorter than a row.
    """
    data = config.data
    source = on_main(lambda: list_shards(config))
    shards = source.shards
    cache, text = open_text(config, source)
    if tokenizer is None:
        tokenizer = on_main(lambda: load_tokenizer(config.tokenizer, corpus=corpus_of(text, shards)))
        assert tokenizer is not None
    known = tokenizer
    validation = on_main(lambda: _validation_tokens(config, text, known))
    settings = StreamSettings(data.streams, data.open_shards, config.run.seed, row_format(config, tokenizer.eos))
    streamed = StreamedText(cache, shards, data.val_fraction, settings, tokenizer)
    identity = {
        "tokenizer": tokenizer.fingerprint,
        "shards": [shard.identity for shard in shards],
        "text_field": data.text_field,
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
    cache = ShardCache(directory, data.cache_gb * 1e9, source.reader, data.text_field, data.on_bad_shard == "skip")
    return cache, OpenShards(cache, source.shards, data.val_fraction, data.open_shards, skipped={})


def corpus_of(text: OpenShards, shards: Sequence[Shard], share: float = 1.0) -> Iterator[str]:
    """Training text for a tokenizer: a share of the usual sample. It is drawn at the first read."""
    yield from draw_sample(shards, lambda number: iter(text.documents(number)), text.val_fraction, share=share)[0]


def _validation_tokens(config: Config, text: OpenShards, tokenizer: Tokenizer) -> Tokens:
    """Held-out documents of the first shards, enough for eval.rows rows or eval.tokens targets.

    eval.rows reads at most data.open_shards shards, and more only if these have no row. eval.tokens may read all
    shards. If both are null, all are read. eval.contexts must not matter, because rows are drawn from these documents,
    and a longer text would have other rows.
    """
    form = row_format(config, tokenizer.eos)
    rows, wanted = config.eval.rows, config.eval.tokens
    takes_all = rows is None and wanted is None
    ids: list[NDArray[np.integer]] = []
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
