"""Text to a directory of token shards, tokenized by several processes. After a kill the next start goes on."""

import contextlib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import Config, DataConfig
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import remove
from ngpt_train.core.progress import Progress
from ngpt_train.data.cache_files import FileHashes, build_directory, cache_directory, canonical_hash, is_filled
from ngpt_train.data.chunks import Tokenizing, chunks_in_order, n_processes
from ngpt_train.data.dataset import Dataset
from ngpt_train.data.rows import check_length, with_rows
from ngpt_train.data.shard_writer import JOURNAL, Journal, ShardWriter, dtype_for
from ngpt_train.data.sources import open_source
from ngpt_train.data.sources.local_files import shards_of, units_of
from ngpt_train.data.sources.source import Counts, Shard, Source, draw_sample, training_part
from ngpt_train.data.token_files import FORMAT, MANIFEST, fingerprint, open_prepared, read_manifest
from ngpt_train.data.tokenizers import load_tokenizer, possible_keys, read_tokenizer, tokenizer_key, write_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Tokenizer, tokenizer_identity

logger = logging.getLogger(__name__)

# To be raised if the same text and settings begin to give other tokens, so that text is prepared anew. FORMAT is the
# version of the files. A changed sample for SentencePiece models needs no new number, because every directory keeps its
# model.
RECIPE = 2
# Chunks that wait for their turn lie in a directory beside the shards. Its name is new at each start, because processes
# of a killed start may still be about to write.
WAITING = "waiting-"


def prepare_dataset(config: Config, out: Path | None = None, tokenizer: Tokenizer | None = None) -> Dataset:
    """Opens the prepared text of `config.data` in `out`, by default in a directory of the cache named by the content.

    Prepares it first unless it is there. A failure or a kill leaves its shards in a hidden directory beside it, and the
    next call goes on after them.
    tokenizer: used instead of `config.tokenizer`.
    Raises DataError for faulty text, and if `out` holds anything else.
    """
    hashes = FileHashes(cache_directory(config))
    config = replace(config, data=replace(config.data, streaming=False))
    source = open_source(config.data)
    tokenizer_keys = [tokenizer_key(config.tokenizer)] if tokenizer is None else possible_keys(tokenizer)
    for described in tokenizer_keys:
        compute_key = partial(_key, config, source, described, hashes)
        key = compute_key()
        directory = out or cache_directory(config) / "tokens" / f"{source.kind}-{key[:16]}"
        # Under all keys but the last, another tokenizer's shards may lie.
        if tokenizer is not None and described != tokenizer_keys[-1] and is_filled(directory):
            made_with = read_manifest(directory)["tokenizer"]
            if [made_with.get("fingerprint"), made_with.get("eos")] == tokenizer_identity(tokenizer):
                break
    prepared_before = is_filled(directory)
    if not prepared_before:
        preparation = Preparation(config, source, compute_key, tokenizer, hashes)
        build_directory(directory, preparation.write, resumable=True)
    if not (directory / MANIFEST).exists() or read_manifest(directory).get("key") != key:
        raise DataError(
            f"{directory} holds something else than this text with this tokenizer and these settings, and is not "
            "overwritten; choose another data.out or delete it"
        )
    if prepared_before:
        logger.info("using the tokens prepared before in %s", directory)
    dataset = with_rows(open_prepared(directory, hashes), config)
    hashes.save()
    return dataset


def _key(config: Config, source: Source, tokenizer_key: list[Any], hashes: FileHashes) -> str:
    """The hash of everything that decides the shards. Unchanged files are not read again."""
    return canonical_hash(
        {
            "version": [FORMAT, RECIPE],
            "kind": source.kind,
            "settings": source.settings,
            "files": source.content(hashes),
            "tokenizer": tokenizer_key,
            **_settings(config.data),
        }
    )


def _settings(data: DataConfig) -> dict[str, Any]:
    """The keys of `data` that decide the shards, without the place of the text."""
    settings = {"val_fraction": data.held_out_share, "shard_tokens": data.shard_tokens}
    return settings | ({"keep_empty": True} if data.keep_empty else {})


class Preparation:
    """Writes the directory of a text, with `write`."""

    def __init__(
        self,
        config: Config,
        source: Source,
        compute_key: Callable[[], str],
        tokenizer: Tokenizer | None,
        hashes: FileHashes,
    ) -> None:
        self._config, self._source, self._compute_key, self._hashes = config, source, compute_key, hashes
        self._where = f"data={source.kind}" + (f" data.path={config.data.path}" if source.kind == "local" else "")
        self._trains = tokenizer is None and config.tokenizer.from_text
        self._tokenizer = tokenizer
        self._key = ""

    def write(self, directory: Path) -> None:
        """Fills `directory`, going on after the shards of an earlier call. A failure before the first finished shard
        leaves nothing. Raises DataError."""
        _remove_waiting(directory)
        worth_keeping = (directory / JOURNAL).exists()
        try:
            self._key = self._compute_key()
            logger.info("preparing %s: reading %s files", self._where, f"{len(self._source.names):,}")
            units = units_of(self._source, self._hashes)
            self._hashes.save()  # so that the next start need not compute them again
            journal = Journal(directory, [unit.identity for unit in units])
            data = self._config.data
            # A text may turn out to be a single document at its end. It is then read again. One .txt file surely is.
            itself = self._source.validates_itself
            for single in ([True] if self._source.is_one_document else [False, True]) if itself else [False]:
                header, tokenizer = self._begin(directory, journal, single)
                reader = self._source.reader
                tokenizing = Tokenizing(reader, tokenizer, data.held_out_share, single, data.keep_empty)
                with contextlib.closing(ShardWriter(directory, journal, header)) as writer:
                    try:
                        self._tokenize(writer, units, directory, tokenizing)
                        if single or not itself or writer.counts.documents != 1:
                            return self._finish(directory, writer, header)
                    finally:
                        worth_keeping = writer.keeps_something
        except BaseException:
            if not worth_keeping:
                _clear(directory)
            raise

    def _begin(self, directory: Path, journal: Journal, single: bool) -> tuple[dict[str, Any], Tokenizer]:
        """The first line of the journal, and the tokenizer. An earlier start with the same settings gives both."""
        if not self._trains and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._config.tokenizer)
        data, tokenizer = self._config.data, self._tokenizer
        settings = canonical_hash(
            {
                "version": [FORMAT, RECIPE],
                "text": [self._source.kind, self._source.settings],
                # A tokenizer to be trained depends on the text.
                "tokenizer": self._key if self._trains or tokenizer is None else tokenizer_identity(tokenizer),
                **_settings(data),
                "single": single,
            }
        )
        before = journal.header()
        if before is not None and before.get("settings") == settings:
            try:
                return before, read_tokenizer(directory, before["tokenizer"])
            except (DataError, KeyError) as error:
                logger.warning("beginning anew: %s", error)
        _clear(directory)
        if tokenizer is None:
            tokenizer = self._tokenizer = self._train()
        entry = write_tokenizer(tokenizer, directory)
        dtype = dtype_for(tokenizer.vocab_size)
        header = {"settings": settings, "dtype": dtype, "shard_tokens": data.shard_tokens, "tokenizer": entry}
        return header, tokenizer

    def _train(self) -> Tokenizer:
        data, tokenizer = self._config.data, self._config.tokenizer
        source = self._source
        shards = [shard for shard in shards_of(source, self._hashes) if not shard.held_out]
        if tokenizer.kind == "words":
            logger.info("counting the words of the text")
            documents = (text for shard in shards for text in source.documents_of(shard))
            return load_tokenizer(tokenizer, corpus=training_part(documents, data.held_out_share))
        logger.info("reading a sample of the text for a SentencePiece model of %d pieces", tokenizer.vocab_size)
        with Progress("sampling", [1]) as progress:
            sample, counts = draw_sample(
                shards,
                lambda number: source.documents_of(shards[number]),
                data.held_out_share,
                partial(progress.heard, 0),
            )
        if counts is not None and source.validates_itself:
            check_splits(counts, self._where, data.val_fraction)
        logger.info("training a SentencePiece model of %d pieces", tokenizer.vocab_size)
        return load_tokenizer(tokenizer, corpus=sample)

    def _tokenize(self, writer: ShardWriter, units: Sequence[Shard], directory: Path, tokenizing: Tokenizing) -> None:
        start = writer.position
        if writer.keeps_something:
            logger.info("going on after %s documents", f"{writer.counts.documents:,}")
        processes = n_processes(self._config.data.prepare_workers, len(units) - start[0])
        sizes = [max(1, unit.size) for unit in units]
        with (
            tempfile.TemporaryDirectory(prefix=WAITING, dir=directory, ignore_cleanup_errors=True) as waiting,
            Progress("preparing", sizes, start[0]) as progress,
            contextlib.closing(chunks_in_order(units, start, tokenizing, processes, Path(waiting))) as chunks,
        ):
            for unit, chunk in chunks:
                progress.heard(unit, chunk.counts.documents, chunk.counts.bytes)
                progress.at(unit)
                if writer.add(unit, chunk):
                    self._check_unchanged()
                    writer.record()

    def _check_unchanged(self) -> None:
        if self._compute_key() != self._key:
            raise DataError(f"{self._where}: a file was changed while it was read; start again")

    def _finish(self, directory: Path, writer: ShardWriter, header: dict[str, Any]) -> None:
        """Closes the shards and writes the manifest. Raises DataError if a split is too small or a file has changed."""
        data, counts = self._config.data, writer.counts
        if self._source.validates_itself:
            check_splits(counts, self._where, data.val_fraction)
        elif not 0 < counts.validation < counts.documents:
            empty = "data.val_files" if counts.validation == 0 else "all of its other files"
            raise DataError(f"{self._where} data.val_files={data.val_files}: no text in {empty}")
        splits = writer.finish()
        for split, entry in splits.items():
            check_length(split, entry["tokens"], self._config.model.context, self._where)
        self._check_unchanged()
        manifest = {
            "version": FORMAT,
            "fingerprint": fingerprint(header["tokenizer"]["fingerprint"], splits),
            "key": self._key,
            "dtype": header["dtype"],
            "tokenizer": header["tokenizer"],
            "source": {
                "kind": self._source.kind,
                **self._source.settings,
                "revision": self._source.revision,
                "documents": counts.documents,
                "bytes": counts.bytes,
                "skipped_empty": counts.empty,
                "text_sha256": writer.text_sha256,
                "val_fraction": data.held_out_share,
                "files": self._source.names,
            },
            "splits": splits,
        }
        (directory / JOURNAL).unlink()
        _remove_waiting(directory)
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _remove_waiting(directory: Path) -> None:
    for left in directory.glob(f"{WAITING}*"):
        remove(left)


def check_splits(counts: Counts, where: str, val_fraction: float) -> None:
    """Raises DataError unless both splits have a document. A single document is cut in two."""
    if counts.documents == 0:
        raise DataError(f"{where}: no text ({counts.empty} empty documents)")
    if counts.documents == 1 or 0 < counts.validation < counts.documents:
        return
    if counts.smallest == counts.largest:
        raise DataError(f"{where}: all {counts.documents} documents are the same text; nothing is left to validate on")
    if counts.validation == 0:
        split, bound, fraction = "validation", "at least", math.ceil(counts.smallest * 1e4) / 1e4
    else:
        split, bound, fraction = "training", "at most", math.floor(counts.largest * 1e4) / 1e4
    raise DataError(
        f"{where}: data.val_fraction={val_fraction} leaves none of {counts.documents} documents for {split}; "
        f"set data.val_fraction to {bound} {fraction:g}, or add documents; to `evaluate` all of a text, set it to 1"
    )
