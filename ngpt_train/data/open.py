"""From `config.data` to a checked data set: prepared tokens, streamed text, or several of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.mixture import mixture_of
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.dataset import Dataset, Mixed, cache_directory, open_prepared, open_tokens
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.mixture import Mixture
from ngpt_train.data.prepared.prepare import prepare_shards
from ngpt_train.data.prepared.shards import Tokens
from ngpt_train.data.prepared_rows import rows_of
from ngpt_train.data.rows import row_format
from ngpt_train.data.streamed.streamed import OnMain, open_streamed
from ngpt_train.data.tokenizers import Tokenizer


def open_dataset(
    config: Config, tokenizer: Tokenizer | None = None, on_main: OnMain = lambda function: function()
) -> Dataset:
    """The text or tokens that `config.data` names, checked. Text that is not streamed is prepared in the cache unless
    it is there.

    tokenizer: to use in place of the one that `config.tokenizer` describes; prepared shards bring their own.
    on_main: of several processes that open streamed text, runs a function on one and returns its result on all.
    Otherwise needs no process group; of several processes that call it at once, one prepares and the others wait.
    Raises ConfigError without `data.path`, DataError if anything is wrong with the text, the files or the
    tokenizer, or if a split is shorter than a row.
    """
    if config.data.kind == "mixture":
        return _open_mixture(config, tokenizer, on_main)
    if config.data.streamed:
        return open_streamed(config, on_main, tokenizer)
    if config.data.kind != "tokens":
        return prepare_dataset(config, tokenizer=tokenizer)
    if config.data.path is None:
        raise ConfigError("data.path=null: data=tokens needs the directory of the shards, as data.path=DIRECTORY")
    hashes = FileHashes(cache_directory(config))
    return _checked(open_tokens(config, hashes, tokenizer), config, hashes)


def prepare_dataset(config: Config, out: Path | None = None, tokenizer: Tokenizer | None = None) -> Dataset:
    """Prepares the text that `config.data` names in `out`, by default the cache, unless it is there; opens it."""
    hashes = FileHashes(cache_directory(config))
    config = replace(config, data=replace(config.data, streaming=False))
    return _checked(open_prepared(prepare_shards(config, hashes, out, tokenizer), hashes), config, hashes)


def _checked(dataset: Dataset, config: Config, hashes: FileHashes) -> Dataset:
    for split in (dataset.train, dataset.validation):
        assert isinstance(split, Tokens)
        rows_of(split, config)
    hashes.save()
    return dataset


def _open_mixture(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """Every source with one tokenizer: that of the prepared shards among them, else the config's."""
    sources = mixture_of(config.data)
    parts: dict[str, Dataset] = {}
    for source in sorted(sources, key=lambda source: source.data.kind != "tokens"):
        try:
            part = open_dataset(replace(config, data=source.data), tokenizer, on_main)
        except DataError as error:
            raise DataError(f"data.mixture, source {source.name}: {error}") from error
        tokenizer = tokenizer or part.tokenizer
        if part.tokenizer.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"data.mixture: {source.name} has the tokenizer {part.tokenizer.name}, another source "
                f"{tokenizer.name}. Prepare all of them with the same one"
            )
        parts[source.name] = part
    assert tokenizer is not None
    mixture = Mixture(tuple(s.name for s in sources), tuple(s.share for s in sources), config.run.seed)
    beginnings = [
        _beginning(parts[source.name].validation, config, max(1, round(source.share * config.eval.rows)))
        for source in sources
    ]
    path = Path("+".join(mixture.names))
    ids, offsets = zip(*beginnings, strict=True)
    validation = Tokens("validation", path, ids, tokenizer.eos, offsets)
    fingerprint = canonical_hash([mixture.names, mixture.shares, [parts[name].fingerprint for name in mixture.names]])
    described = {name: part.manifest["source"] for name, part in parts.items()}
    manifest = {"source": {"kind": "mixture", "sources": described}}
    mixed = Mixed(mixture, tuple(parts[name] for name in mixture.names))
    return Dataset(mixed, validation, tokenizer, fingerprint, path, manifest)


def _beginning(tokens: Tokens, config: Config, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and offsets of the first documents of a split, as many as make `n_rows` rows, or all."""
    form = row_format(config, tokens.eos)
    lengths = tokens.documents()[1]
    if form.source_context is None:
        full = lengths.cumsum() // form.context
    else:
        full = (lengths >= form.source_context + 2).cumsum()
    ends = lengths[: int(np.searchsorted(full, n_rows)) + 1].cumsum()
    ids = np.empty(int(ends[-1]), np.int64)
    tokens.read(0, ids)
    return ids, np.append(0, ends)
