"""A data set whose text is tokenized while it is trained on: its shards are listed, its validation split is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset, cache_directory
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.prepared.shards import Tokens, check_length
from ngpt_train.data.rows import row_format
from ngpt_train.data.sources.local_shards import local_shards
from ngpt_train.data.sources.source import Source, open_source
from ngpt_train.data.streamed.shard_cache import ShardCache, ShardedText
from ngpt_train.data.streamed.streams import StreamSettings, with_eos
from ngpt_train.data.streamed.workers import StreamedText
from ngpt_train.data.tokenizers import Tokenizer, load_tokenizer

T = TypeVar("T")
OnMain = Callable[[Callable[[], Any]], Any]
# Text that a SentencePiece model is trained from at most.
SAMPLE_CHARACTERS = 32_000_000


def open_streamed(config: Config, on_main: OnMain, tokenizer: Tokenizer | None = None) -> Dataset:
    """The text that `config.data` names, without reading more of it than the validation split and the tokenizer need.

    on_main: runs a function on one process and returns its result on all; shards are listed and held-out text is read
    by that one alone. Raises DataError if anything is wrong with the shards or the tokenizer, or if what is held out
    is shorter than a row.
    """
    source = on_main(lambda: list_shards(config))
    shards = source.shards
    data = config.data
    cache = ShardCache(
        cache_directory(config) / "documents",
        data.cache_gb * 1e9,
        source.reader,
        data.text_field,
        skip_bad=data.on_bad_shard == "skip",
    )
    text = ShardedText(cache, shards, data.val_fraction, data.open_shards, skipped={})
    if tokenizer is None:
        tokenizer = on_main(lambda: load_tokenizer(config.tokenizer, corpus=sample(text, SAMPLE_CHARACTERS)))
        assert tokenizer is not None
    known = tokenizer
    held_out = on_main(lambda: validation_tokens(config, text, known))
    streamed = StreamedText(cache, shards, data.val_fraction, stream_settings(config), tokenizer)
    fingerprint = canonical_hash(
        {
            "tokenizer": tokenizer.fingerprint,
            "shards": [shard.identity for shard in shards],
            "text_field": data.text_field,
            "val_fraction": data.val_fraction,
        }
    )
    manifest = {"source": {"kind": data.kind, "revision": source.revision, "shards": source.names}}
    return Dataset(streamed, held_out, tokenizer, fingerprint, Path(data.path or data.repo or data.kind), manifest)


def list_shards(config: Config) -> Source:
    """Where the text is, and its parts in their order."""
    source = open_source(config.data)
    if source.shards:
        return source
    hashes = FileHashes(cache_directory(config))
    shards = local_shards(source.files, source.settings, hashes)
    hashes.save()
    return replace(source, shards=shards)


def stream_settings(config: Config) -> StreamSettings:
    data, form = config.data, row_format(config, eos=0)
    beginnings = form.source_context is not None
    return StreamSettings(
        n_streams=data.streams,
        open_shards=data.open_shards,
        seed=config.run.seed,
        context=form.context,
        rows="prefix_continuation" if beginnings else data.pack,
        shortest=form.source_context + 2 if form.source_context is not None else 0,
    )


def sample(text: ShardedText, characters: int) -> Iterator[str]:
    """Training documents of the first shards, about so many characters of them."""
    for shard in range(text.n_shards):
        for index in range(text.n_documents(shard)):
            document = text.document(shard, index)
            if document is not None:
                characters -= len(document)
                yield document
            if characters <= 0:
                return


def validation_tokens(config: Config, text: ShardedText, tokenizer: Tokenizer) -> Tokens:
    """Held-out documents of the first shards until they make eval.rows rows; of data.open_shards, or of more where
    these make none."""
    settings = stream_settings(config)
    ids: list[Any] = []
    n_tokens = n_documents = 0
    faulty: list[str] = []
    full = 0
    for shard in range(text.n_shards):
        if (problem := text.documents(shard).header["bad"]) is not None:
            faulty.append(problem)
        for document in held_out(text, shard):
            ids.append(with_eos(tokenizer, document))
            n_tokens += len(ids[-1])
            n_documents += len(ids[-1]) >= settings.shortest
            full = n_documents if settings.rows == "prefix_continuation" else (n_tokens - 1) // settings.context
            if full >= config.eval.rows:
                break
        if full >= config.eval.rows or (full and shard + 1 >= config.data.open_shards):
            break
    path = Path(config.data.path or config.data.repo or config.data.kind)
    where = f"{path}, streamed"
    if n_tokens == 0 and text.n_shards == 1:
        where += " (data.streaming=false cuts a single document in two)"
    if faulty:
        where += f" ({len(faulty)} left out as faulty, such as {faulty[0]})"
    check_length("validation", n_tokens, config.model.context, where)
    offsets = np.cumsum([0, *map(len, ids)])
    return Tokens("validation", path, [np.concatenate(ids)], tokenizer.eos, [offsets])


def held_out(text: ShardedText, shard: int) -> Iterator[str]:
    documents = text.documents(shard)
    for index in np.flatnonzero(documents.places < text.val_fraction).tolist():
        yield documents.text(index)
