"""Text to token shards: read and check everything once, train the tokenizer if need be, then write.

The first pass finds every fault of the text before anything is on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.keys import DataError
from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import FORMAT, MANIFEST, STEMS, cache_directory, fingerprint, read_manifest
from ngpt_train.data.directory import build_directory, is_filled
from ngpt_train.data.documents import place_of
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.readers import extension
from ngpt_train.data.shards import SplitWriter, check_length, dtype_for
from ngpt_train.data.source import Source, open_source
from ngpt_train.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_key, write_tokenizer

logger = logging.getLogger(__name__)

# To be raised when the same text and settings begin to give other tokens; FORMAT is that of the files.
RECIPE = 1
# Text that a SentencePiece model is trained from at most: more changes few pieces and takes long.
SAMPLE_CHARACTERS = 32_000_000
SAMPLE_PIECE = 16_384
BATCH_CHARACTERS = 4_000_000
PROGRESS_SECONDS = 5.0


def prepare_shards(
    config: Config, hashes: FileHashes, out: Path | None = None, tokenizer: Tokenizer | None = None
) -> Path:
    """The directory of token shards for the text of `config`: `out`, or one in the cache that the content names.

    tokenizer: to use in place of the one that `config.tokenizer` describes. Writes the shards unless they are
    there already. Raises DataError for faulty text, and if `out` holds anything else.
    """
    source = open_source(config.data)

    def place(tokenizer_key: list[Any]) -> tuple[Callable[[], str], Path]:
        compute_key = partial(_key, config, source, tokenizer_key, hashes)
        return compute_key, out or cache_directory(config) / "tokens" / f"{source.kind}-{compute_key()[:16]}"

    if tokenizer is None:
        compute_key, directory = place(tokenizer_key(config.tokenizer))
    else:
        # The text that a tokenizer was trained from lies there under the settings of the training.
        compute_key, directory = place([tokenizer.kind, "trained", tokenizer.vocab_size])
        if not is_filled(directory) or read_manifest(directory)["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
            of_a_file = [tokenizer.fingerprint] if tokenizer.kind in ("sentencepiece", "hf") else []
            compute_key, directory = place([tokenizer.kind, *of_a_file])
    key = compute_key()
    prepared_before = is_filled(directory)
    if not prepared_before:
        build_directory(
            directory, partial(_write, config=config, source=source, compute_key=compute_key, tokenizer=tokenizer)
        )
    if not (directory / MANIFEST).exists() or read_manifest(directory).get("key") != key:
        raise DataError(
            f"{directory} holds something else than this text with this tokenizer and these settings, and is not "
            "overwritten; choose another data.out or delete it"
        )
    if prepared_before:
        logger.info("using the tokens prepared before in %s", directory)
    return directory


def _key(config: Config, source: Source, tokenizer_key: list[Any], hashes: FileHashes) -> str:
    """What decides the shards, as one hash: found without reading the text if no file has changed."""
    return canonical_hash(
        {
            "version": [FORMAT, RECIPE],
            "kind": source.kind,
            "settings": source.settings,
            "files": [[extension(file), _sha256(file, hashes)] for file in source.files],
            "tokenizer": tokenizer_key,
            "val_fraction": config.data.val_fraction,
            "shard_tokens": config.data.shard_tokens,
        }
    )


def _sha256(path: Path, hashes: FileHashes) -> str:
    try:
        return hashes.sha256(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _write(
    directory: Path, config: Config, source: Source, compute_key: Callable[[], str], tokenizer: Tokenizer | None
) -> None:
    key = compute_key()
    where = f"data={source.kind}" + (f" data.path={config.data.path}" if source.kind == "local" else "")
    logger.info("preparing %s: reading %s files", where, f"{len(source.files):,}")
    trains = tokenizer is None and config.tokenizer.kind == "sentencepiece" and config.tokenizer.path is None
    if tokenizer is None and not trains:
        tokenizer = load_tokenizer(config.tokenizer)
    scan = _scan(source, config.data.val_fraction, keep_sample=trains)
    logger.info("%s documents, %.1f MB", f"{scan.n_documents:,}", scan.n_bytes / 1e6)
    scan.check_splits(where, config.data.val_fraction)
    if tokenizer is None:
        logger.info("training a SentencePiece model of %d pieces", config.tokenizer.vocab_size)
        tokenizer = load_tokenizer(config.tokenizer, corpus=scan.sample)
    splits = _write_splits(directory, _placed(source, scan.only, config.data.val_fraction), scan, tokenizer, config)
    for split, entry in splits.items():
        check_length(split, entry["tokens"], config.model.context, where)
    if compute_key() != key:
        raise DataError(f"{where}: a file was changed while it was read; start again")
    tokenizer_entry = write_tokenizer(tokenizer, directory)
    manifest = {
        "version": FORMAT,
        "fingerprint": fingerprint(tokenizer.fingerprint, splits),
        "key": key,
        "dtype": dtype_for(tokenizer.vocab_size),
        "tokenizer": tokenizer_entry,
        "source": {
            "kind": source.kind,
            **source.settings,
            "documents": scan.n_documents,
            "bytes": scan.n_bytes,
            "skipped_empty": scan.n_empty,
            "text_sha256": scan.text_hash.hexdigest(),
            "val_fraction": config.data.val_fraction,
            "files": [str(file) for file in source.files],
        },
        "splits": splits,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


@dataclass
class _Scan:
    """What the first pass over the text finds."""

    n_documents: int = 0
    n_bytes: int = 0
    n_empty: int = 0
    n_validation: int = 0
    smallest: float = 1.0
    largest: float = 0.0
    text_hash: Any = field(default_factory=hashlib.sha256)
    sample: list[str] = field(default_factory=list)
    only: str | None = None  # the text, where it is a single document

    def check_splits(self, where: str, val_fraction: float) -> None:
        """Raises DataError unless both splits have a document."""
        if self.n_documents == 0:
            raise DataError(f"{where}: no text ({self.n_empty} empty documents)")
        if self.only is not None or 0 < self.n_validation < self.n_documents:
            return
        if self.smallest == self.largest:
            raise DataError(
                f"{where}: all {self.n_documents} documents are the same text; nothing is left to validate on"
            )
        if self.n_validation == 0:
            split, bound, fraction = "validation", "at least", math.ceil(self.smallest * 1e4) / 1e4
        else:
            split, bound, fraction = "training", "at most", math.floor(self.largest * 1e4) / 1e4
        raise DataError(
            f"{where}: data.val_fraction={val_fraction} leaves none of {self.n_documents} documents for {split}; "
            f"set data.val_fraction to {bound} {fraction:g}, or add documents"
        )


def _placed(source: Source, only: str | None, val_fraction: float) -> Iterator[tuple[str, str]]:
    """(split, text) of every document. A single document, such as one .txt file, is cut: its end validates."""
    if only is not None:
        cut = len(only) - max(1, round(val_fraction * len(only)))
        cut = only.rfind("\n", 0, cut) + 1 or cut
        yield from (("train", only[:cut]), ("validation", only[cut:]))
        return
    for text in source.documents():
        if text:
            yield "validation" if place_of(text.encode()) < val_fraction else "train", text


def _scan(source: Source, val_fraction: float, keep_sample: bool) -> _Scan:
    scan = _Scan()
    sample = _Sample(SAMPLE_CHARACTERS)
    for text in source.documents():
        if not text:
            scan.n_empty += 1
            continue
        scan.only = text if scan.n_documents == 0 else None
        data = text.encode()
        position = place_of(data)
        scan.n_documents += 1
        scan.n_bytes += len(data)
        scan.n_validation += position < val_fraction
        scan.smallest = min(scan.smallest, position)
        scan.largest = max(scan.largest, position)
        # With its length before it, no other list of documents has the same bytes.
        scan.text_hash.update(len(data).to_bytes(8, "little") + data)
        if keep_sample and position >= val_fraction:
            sample.add(text, position)
    if keep_sample and scan.only is not None:
        sample = _Sample(SAMPLE_CHARACTERS)
        sample.add(next(_placed(source, scan.only, val_fraction))[1], 0.0)
    scan.sample = sample.texts()
    return scan


class _Sample:
    """A sample of the text within a number of characters, the same however often it is drawn."""

    def __init__(self, characters: int):
        self._characters = characters
        self._limit = 1.0
        self._pieces: list[tuple[float, str]] = []
        self._size = 0

    def add(self, text: str, position: float) -> None:
        for start in range(0, len(text), SAMPLE_PIECE):
            rank = place_of(f"{position} {start}".encode())
            if rank < self._limit:
                self._pieces.append((rank, text[start : start + SAMPLE_PIECE]))
                self._size += len(self._pieces[-1][1])
        while self._size > self._characters:
            self._limit /= 2
            self._pieces = [piece for piece in self._pieces if piece[0] < self._limit]
            self._size = sum(len(text) for _, text in self._pieces)

    def texts(self) -> list[str]:
        return [text for _, text in self._pieces]


def _write_splits(
    directory: Path, placed: Iterable[tuple[str, str]], scan: _Scan, tokenizer: Tokenizer, config: Config
) -> dict[str, dict[str, Any]]:
    dtype = dtype_for(tokenizer.vocab_size)
    writers = {name: SplitWriter(directory, stem, dtype, config.data.shard_tokens) for name, stem in STEMS.items()}
    eos = np.array([tokenizer.eos])
    n_documents = n_bytes = 0
    start = reported = time.monotonic()
    for batch in _batches(placed):
        for (split, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            size = len(text.encode())
            writers[split].add(np.concatenate([ids, eos]), size)
            n_bytes += size
        n_documents += len(batch)
        now = time.monotonic()
        if now - reported > PROGRESS_SECONDS:
            reported = now
            logger.info(
                "%s of %s documents, %.0f %%, %.1f MB/s",
                f"{n_documents:,}",
                f"{scan.n_documents:,}",
                100 * n_bytes / scan.n_bytes,
                n_bytes / 1e6 / (now - start),
            )
    return {name: writer.finish() for name, writer in writers.items()}


def _batches(placed: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    size = 0
    for split, text in placed:
        batch.append((split, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
