"""From `config.data` to a checked data set: prepared tokens, streamed text, or several of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config, TokenizerConfig
from ngpt_train.config.sections.data import SourceConfig, mixture_of
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.hashes import FileHashes, cache_directory, canonical_hash
from ngpt_train.data.mixture import Mixture
from ngpt_train.data.prepared.build import prepare_shards
from ngpt_train.data.prepared.foreign import find_megatron, find_nanogpt, open_megatron, open_nanogpt
from ngpt_train.data.prepared.shards import (
    MANIFEST,
    STEMS,
    Tokens,
    check_length,
    damaged_manifest,
    fingerprint,
    open_shards,
    read_manifest,
)
from ngpt_train.data.rows import row_format, rows_of
from ngpt_train.data.sources import open_source
from ngpt_train.data.sources.local import shards_of
from ngpt_train.data.sources.text import Shard, Source, draw_sample
from ngpt_train.data.streamed.cache import OpenShards, ShardCache
from ngpt_train.data.streamed.stream import stream_settings
from ngpt_train.data.streamed.workers import StreamedText
from ngpt_train.data.tokenizers import (
    Tokenizer,
    known_vocabulary,
    load_tokenizer,
    possible_keys,
    read_tokenizer,
    tokenizer_identity,
    tokenizer_key,
    with_eos,
)

OnMain = Callable[[Callable[[], Any]], Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixed:
    """The training text of several data sets."""

    mixture: Mixture
    sources: tuple[Dataset, ...]


@dataclass(frozen=True)
class Dataset:
    """Both splits, and what identifies them: the same token ids and tokenizer have the same fingerprint."""

    train: Tokens | StreamedText | Mixed
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    path: Path
    manifest: dict[str, Any]

    @property
    def commits(self) -> dict[str, str | None]:
        """Of data sets of the hub, as `config.mixture.commits_of` names them."""
        source = self.manifest["source"]
        if source["kind"] != "mixture":
            return {"": source.get("revision")}
        return {name: part.get("revision") for name, part in source["sources"].items()}


def open_dataset(
    config: Config, tokenizer: Tokenizer | None = None, on_main: OnMain = lambda function: function()
) -> Dataset:
    """The text or tokens that `config.data` names, checked. Text that is not streamed is prepared in the cache unless
    it is there.

    tokenizer: to use in place of the one that `config.tokenizer` describes; prepared shards bring their own.
    on_main: where several processes open streamed text, runs a function on one of them and returns its result on all.
    The function may list, download and tokenize for hours: no collective with a time limit may wait for it.
    Without streamed text no process group is needed; of several processes that call it, one prepares, the others wait.
    data.val_fraction=1: nothing is left to train on, and nothing is prepared.
    Raises ConfigError without `data.path`, DataError if anything is wrong with the text, the files or the
    tokenizer, or if a split is shorter than a row.
    """
    if config.data.val_fraction == 1:
        return _open_whole(config, tokenizer, on_main)
    if config.data.kind == "mixture":
        return _open_mixture(config, tokenizer, on_main)
    if config.data.streamed:
        return _open_streamed(config, tokenizer, on_main)
    if config.data.kind != "tokens":
        return prepare_dataset(config, tokenizer=tokenizer)
    if config.data.path is None:
        raise ConfigError("data.path=null: data=tokens needs the directory of the shards, as data.path=DIRECTORY")
    hashes = FileHashes(cache_directory(config))
    return _checked(_open_tokens(config, hashes, tokenizer), config, hashes)


def prepare_dataset(config: Config, out: Path | None = None, tokenizer: Tokenizer | None = None) -> Dataset:
    """Prepares the text that `config.data` names in `out`, by default the cache, unless it is there; opens it."""
    hashes = FileHashes(cache_directory(config))
    config = replace(config, data=replace(config.data, streaming=False))
    return _checked(_open_prepared(prepare_shards(config, hashes, out, tokenizer), hashes), config, hashes)


def _checked(dataset: Dataset, config: Config, hashes: FileHashes) -> Dataset:
    for split in (dataset.train, dataset.validation):
        assert isinstance(split, Tokens)
        rows_of(split, config)
    hashes.save()
    return dataset


# --- tokens on disk


def _open_prepared(directory: Path, hashes: FileHashes) -> Dataset:
    """Opens a directory that `prepare` wrote. Raises DataError if any file differs from the manifest."""
    manifest = read_manifest(directory)
    try:
        train, validation = (open_shards(split, directory, manifest, hashes) for split in STEMS)
        tokenizer = read_tokenizer(directory, manifest["tokenizer"])
        found = fingerprint(tokenizer.fingerprint, manifest["splits"])
        if found != manifest["fingerprint"]:
            raise ValueError("its fingerprint does not fit its content")
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise damaged_manifest(directory / MANIFEST, error) from None
    return Dataset(train, validation, tokenizer, found, directory, manifest)


def _open_tokens(config: Config, hashes: FileHashes, tokenizer: Tokenizer | None) -> Dataset:
    """Opens `data.path`: a directory of prepared shards or of nanoGPT's train.bin and val.bin, or Megatron's files.

    Prepared shards bring their tokenizer; the others need `tokenizer`, or the one that `config.tokenizer` names.
    Raises DataError if they are damaged or of another tokenizer.
    """
    path = Path(config.data.path or "").expanduser()
    if (path / MANIFEST).exists():
        dataset = _open_prepared(path, hashes)
        _warn_of_unused(config.tokenizer, dataset)
        return dataset
    megatron = find_megatron(path)
    files = megatron or find_nanogpt(path, config.data.path)
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    if megatron is not None:
        splits = open_megatron(files, tokenizer, hashes, config.data.val_fraction)
    else:
        splits = open_nanogpt(files, tokenizer, hashes)
    entry = {"kind": tokenizer.kind, "name": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}
    described = {split: {"tokens": len(tokens), "sha256": sha256} for split, (tokens, sha256) in splits.items()}
    found = fingerprint(tokenizer.fingerprint, described)
    source = {"kind": "nanogpt" if megatron is None else "megatron"}
    manifest = {"source": source, "tokenizer": entry, "fingerprint": found, "splits": described}
    return Dataset(splits["train"][0], splits["validation"][0], tokenizer, found, path, manifest)


def _warn_of_unused(chosen: TokenizerConfig, dataset: Dataset) -> None:
    """Says so where prepared shards bring another tokenizer than the one that somebody chose, such as a paper's row."""
    found = dataset.tokenizer
    if known_vocabulary(chosen.kind) is None:  # then only its model file tells which tokenizer it is
        same = chosen.kind in (found.kind, TokenizerConfig().kind)
    else:
        same = tokenizer_key(chosen) in possible_keys(found)
    if not same:
        logger.warning(
            "tokenizer.kind=%s is not used: the shards in %s have tokens of %s", chosen.kind, dataset.path, found.name
        )


# --- streamed text


def _open_streamed(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """The text that `config.data` names, without reading more of it than the validation split and the tokenizer need.

    Shards are listed, and held-out text is read, where `on_main` runs a function. Raises DataError if anything is
    wrong with the shards or the tokenizer, or if what is held out is shorter than a row.
    """
    data = config.data
    source = on_main(lambda: _list_shards(config))
    shards = source.shards
    cache, text = _open_text(config, source)
    if tokenizer is None:
        tokenizer = on_main(lambda: load_tokenizer(config.tokenizer, corpus=_corpus(text, shards)))
        assert tokenizer is not None
    known = tokenizer
    validation = on_main(lambda: _validation_tokens(config, text, known))
    streamed = StreamedText(cache, shards, data.val_fraction, stream_settings(config, tokenizer.eos), tokenizer)
    identity = {
        "tokenizer": tokenizer.fingerprint,
        "shards": [shard.identity for shard in shards],
        "text_field": data.text_field,
        "val_fraction": data.val_fraction,
    }
    manifest = {"source": {"kind": data.kind, "revision": source.revision, "shards": source.names}}
    return Dataset(streamed, validation, tokenizer, canonical_hash(identity), _path(config), manifest)


def _list_shards(config: Config) -> Source:
    """Where the text is, and its shards in their order."""
    source = open_source(config.data)
    hashes = FileHashes(cache_directory(config))
    source = replace(source, shards=shards_of(source, hashes))
    hashes.save()
    return source


def _open_text(config: Config, source: Source) -> tuple[ShardCache, OpenShards]:
    data, directory = config.data, cache_directory(config) / "documents"
    cache = ShardCache(directory, data.cache_gb * 1e9, source.reader, data.text_field, data.on_bad_shard == "skip")
    return cache, OpenShards(cache, source.shards, data.val_fraction, data.open_shards, skipped={})


def _corpus(text: OpenShards, shards: Sequence[Shard], share: float = 1.0) -> Iterator[str]:
    """What a tokenizer is trained from, a share of the usual sample; drawn only if one is."""
    yield from draw_sample(shards, lambda number: iter(text.documents(number)), text.val_fraction, share=share)[0]


def _validation_tokens(config: Config, text: OpenShards, tokenizer: Tokenizer) -> Tokens:
    """Held-out documents of the first shards until they make eval.rows rows, or have eval.tokens targets.

    For rows, no more than data.open_shards shards are read, unless these make none; for eval.tokens all, if need be,
    and where both are None.
    eval.contexts has no part in it: the rows are drawn from these documents, so a longer text would have other rows.
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
    where = f"{_path(config)}, streamed"
    if n_tokens == 0 and text.n_shards == 1:
        where += " (data.streaming=false cuts a single document in two)"
    if faulty:
        where += f" ({len(faulty)} left out as faulty, such as {faulty[0]})"
    check_length("validation", n_tokens, config.model.context, where)
    offsets = np.cumsum([0, *map(len, ids)])
    return Tokens("validation", _path(config), [np.concatenate(ids)], tokenizer.eos, [offsets])


def _path(config: Config) -> Path:
    return Path(config.data.path or config.data.repo or config.data.kind)


# --- all of a text


def _open_whole(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """All of the text that `config.data` names as the validation split. Text that is not streamed is tokenized in
    memory: to evaluate it takes far longer.

    Raises ConfigError where the data is no text or has files that validate, DataError where the text cannot be read or
    is shorter than a row.
    """
    data, path = config.data, _path(config)
    if data.kind in ("tokens", "mixture") or data.val_files is not None:
        named, fix = f"data.kind={data.kind}", "Name the text with data=local data.path=FILE"
        if data.val_files is not None:
            named, fix = f"data.val_files={data.val_files}", "Set data.val_files=null, or leave data.val_fraction out"
        raise ConfigError(f"data.val_fraction=1, {named}: has a validation split of its own\n  {fix}")
    if data.streamed:
        return _open_streamed(config, tokenizer, on_main)
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    documents = [with_eos(tokenizer, text) for text in open_source(data).documents() if text or data.keep_empty]
    offsets = np.cumsum([0, *map(len, documents)])
    context = config.model.context
    if offsets[-1] <= context and not config.model.source_length(context):
        raise DataError(
            f"{path}: has {offsets[-1]} tokens, less than one row (model.context + 1 = {context + 1}); add text, or "
            f"take documents of any length with evaluate.length.contexts=[{context}]"
        )
    ids = np.concatenate(documents)
    found = canonical_hash([tokenizer.fingerprint, hashlib.sha256(ids.tobytes()).hexdigest()])
    validation = Tokens("validation", path, [ids], tokenizer.eos, [offsets])
    return Dataset(Tokens("train", path, [], tokenizer.eos), validation, tokenizer, found, path, {})


# --- mixtures


def _open_mixture(config: Config, tokenizer: Tokenizer | None, on_main: OnMain) -> Dataset:
    """Every source with one tokenizer: that of the prepared shards among them, else the config's, which may be trained
    on all sources."""
    sources = mixture_of(config.data)
    opened: dict[str, Dataset] = {}
    if tokenizer is None and config.tokenizer.from_text and all(source.data.kind != "tokens" for source in sources):
        tokenizer = on_main(lambda: load_tokenizer(config.tokenizer, corpus=_mixed_corpus(config, sources)))
    for source in sorted(sources, key=lambda source: source.data.kind != "tokens"):
        try:
            data = open_dataset(replace(config, data=source.data), tokenizer, on_main)
        except DataError as error:
            raise DataError(f"data.mixture, source {source.name}: {error}") from error
        tokenizer = tokenizer or data.tokenizer
        if tokenizer_identity(data.tokenizer) != tokenizer_identity(tokenizer):
            raise DataError(
                f"data.mixture: {source.name} has the tokenizer {data.tokenizer.name} with eos {data.tokenizer.eos}, "
                f"another source {tokenizer.name} with eos {tokenizer.eos}. Prepare all of them with the same one"
            )
        opened[source.name] = data
    assert tokenizer is not None
    mixture = Mixture(tuple(s.name for s in sources), tuple(s.share for s in sources), config.run.seed)
    beginnings = [_beginning(opened[source.name].validation, config, source.share) for source in sources]
    path = Path("+".join(mixture.names))
    ids, offsets = zip(*beginnings, strict=True)
    validation = Tokens("validation", path, ids, tokenizer.eos, offsets)
    found = canonical_hash([mixture.names, mixture.shares, [opened[name].fingerprint for name in mixture.names]])
    described = {name: data.manifest["source"] for name, data in opened.items()}
    manifest = {"source": {"kind": "mixture", "sources": described}}
    mixed = Mixed(mixture, tuple(opened[name] for name in mixture.names))
    return Dataset(mixed, validation, tokenizer, found, path, manifest)


def _mixed_corpus(config: Config, sources: Sequence[SourceConfig]) -> Iterator[str]:
    """What a tokenizer is trained from, in the sources' shares."""
    logger.info("training a SentencePiece model of %d pieces on all sources", config.tokenizer.vocab_size)
    for source in sources:
        own = replace(config, data=source.data)
        listed = _list_shards(own)
        yield from _corpus(_open_text(own, listed)[1], listed.shards, source.share)


def _beginning(tokens: Tokens, config: Config, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and offsets of the first documents of a split, as many as make a share of eval.rows or tokens, or all."""
    form = row_format(config, tokens.eos)
    lengths = tokens.documents()[1]
    wanted = config.eval.rows or config.eval.tokens
    assert wanted is not None
    if config.eval.rows is None:
        full = form.targets_of(lengths).cumsum()
    else:
        full = lengths.cumsum() // form.context if form.source_context is None else (lengths >= form.shortest).cumsum()
    ends = lengths[: int(np.searchsorted(full, max(1, round(share * wanted)))) + 1].cumsum()
    ids = np.empty(int(ends[-1]), np.int64)
    tokens.read(0, ids)
    return ids, np.append(0, ends)
