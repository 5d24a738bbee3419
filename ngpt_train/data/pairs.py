"""Pairs of a text and its translation: their token ids, their rows, and batches of pairs of like length.

A row has two halves, both as wide as the longest text of its batch: the source and eos, for the encoder, then eos and
the translation, for the decoder, whose targets are the translation and eos. The rest of each half is padding, which has
no target, and a doc_id of PADDING.

The pairs are shuffled in each epoch. Of WINDOW consecutive ones those of like length make a batch: as many, in
multiples of `rows_multiple`, as have at most train.batch_tokens with their padding. The batches of a window come in a
seeded order. So a batch is a function of the run's seed and of the number of rows before it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED, PADDING
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.data.cache_files import build_directory, cache_directory, canonical_hash
from ngpt_train.data.dataset import Dataset, Tokens, path_of
from ngpt_train.data.labelled import documents_by_split
from ngpt_train.data.permutation import keyed_order, shuffled
from ngpt_train.data.tokenizers import load_tokenizer, read_tokenizer, tokenizer_key, write_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Ids, Tokenizer

logger = logging.getLogger(__name__)

WINDOW = 8192  # pairs that are sorted by length together; a multiple of MULTIPLE
MULTIPLE = 8  # of rows in a batch, so that 2, 4 or 8 ranks share it


class Pairs(Tokens):
    """A split of pairs, as ids without eos. It counts as one text, the translations."""

    def __init__(self, split: str, path: Path, eos: int, sources: list[Ids], translations: list[Ids]) -> None:
        super().__init__(split, path, [np.append(ids, eos) for ids in translations], eos)
        self.sources, self.translations = sources, translations
        # The longer side of each pair, with its eos.
        self.lengths = np.array([1 + max(map(len, pair)) for pair in zip(sources, translations, strict=True)], np.int64)


def open_pairs(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """Both splits. Without a tokenizer or a file of one, a SentencePiece model is trained on both sides of the training
    text. Pairs that do not fit into a row, or have an empty side, are left out. With data.val_fraction=1 all others
    validate. Raises DataError for a faulty text, and for a split without pairs."""
    data, path = config.data, path_of(config)
    source, texts = documents_by_split(data)
    tokenizer = tokenizer or _tokenizer(config, texts["train"])
    splits = [_pairs(split, path, of_split, config, tokenizer) for split, of_split in texts.items()]
    found = canonical_hash([tokenizer.fingerprint, tokenizer.eos, config.model.context // 2, texts])
    return Dataset(
        splits[0], splits[1], tokenizer, found, path, {"source": {"kind": source.kind, "revision": source.revision}}
    )


def _tokenizer(config: Config, texts: list[list[str]]) -> Tokenizer:
    """The tokenizer of the config. One that is made from the text stays in the cache."""
    if not config.tokenizer.from_text:
        return load_tokenizer(config.tokenizer)
    key = canonical_hash([tokenizer_key(config.tokenizer), texts])
    directory = cache_directory(config) / "tokens" / f"pairs-{key[:16]}"

    def build(directory: Path) -> None:
        logger.info("training a SentencePiece model of %d pieces on both sides", config.tokenizer.vocab_size)
        made = load_tokenizer(config.tokenizer, corpus=(side for pair in texts for side in pair))
        write_json(directory / "tokenizer.json", write_tokenizer(made, directory))

    build_directory(directory, build)
    return read_tokenizer(directory, read_json(directory / "tokenizer.json"))


def _pairs(split: str, path: Path, texts: list[list[str]], config: Config, tokenizer: Tokenizer) -> Pairs:
    sources, translations = [], []
    for pair in texts:
        source, translation = (tokenizer.encode(text) for text in pair)
        if len(source) and len(translation) and 1 + max(len(source), len(translation)) <= config.model.context // 2:
            sources.append(source)
            translations.append(translation)
    if not sources and (split == "validation" or config.data.val_fraction < 1):
        raise DataError(
            f"{path}: no pair of the {split} split fits into a row, whose halves have model.context / 2 = "
            f"{config.model.context // 2} tokens; raise model.context, name files with data.val_files, or add pairs"
        )
    if len(sources) < len(texts):
        left_out = f"{len(texts) - len(sources):,} of {len(texts):,} pairs"
        logger.info("%s of the %s split are left out: a side is empty or longer than half a row", left_out, split)
    return Pairs(split, path, tokenizer.eos, sources, translations)


class PairRows:
    """Row k is pair k of a split."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs.sources)

    def batch(self, indices: NDArray[np.int64], half: int | None = None) -> tuple[NDArray[np.int64], ...]:
        """Tokens, targets and document ids, each (N, 2 half). half: by default the longest side of these pairs."""
        half = int(self.pairs.lengths[indices].max()) if half is None else half
        eos, shape = self.pairs.eos, (len(indices), 2 * half)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        doc_ids = np.full(shape, PADDING, np.int64)
        for row, index in enumerate(indices.tolist()):
            source, translation = self.pairs.sources[index], self.pairs.translations[index]
            n_source, end = len(source) + 1, half + len(translation) + 1
            tokens[row, :n_source] = np.append(source, eos)
            tokens[row, half:end] = np.append(eos, translation)
            targets[row, half:end] = np.append(translation, eos)
            doc_ids[row, :n_source] = doc_ids[row, half:end] = 0
        return tokens, targets, doc_ids


@dataclass(frozen=True)
class Window:
    """The pairs of a window in the order of its batches."""

    indices: NDArray[np.int64]  # (WINDOW,)
    ends: NDArray[np.int64]  # of each batch in `indices`
    halves: NDArray[np.int64]  # the width of each batch

    def batch_at(self, offset: int) -> int:
        """The batch with the pair at `offset`."""
        return int(np.searchsorted(self.ends, offset, side="right"))


def rows_multiple(batch_rows: int) -> int:
    """Rows of a batch are a multiple of it: MULTIPLE, or less if train.batch_rows is no multiple of that."""
    return math.gcd(batch_rows, MULTIPLE)


def window_of(lengths: NDArray[np.int64], number: int, batch_rows: int, most_tokens: int, seed: int) -> Window:
    """Window `number` of a run. lengths: of all pairs. most_tokens: of a batch, padding included, enough for batch_rows
    of the longest pairs."""
    indices = shuffled(np.arange(number * WINDOW, (number + 1) * WINDOW), len(lengths), seed)
    indices = indices[np.argsort(lengths[indices], kind="stable")]
    parts = [indices[first:end] for first, end in _cuts(lengths[indices], rows_multiple(batch_rows), most_tokens)]
    parts = [parts[k] for k in keyed_order(len(parts), seed, number)]
    halves = [int(lengths[part].max()) for part in parts]
    return Window(np.concatenate(parts), np.cumsum([len(part) for part in parts]), np.array(halves))


def _cuts(lengths: NDArray[np.int64], multiple: int, most_tokens: int) -> Iterator[tuple[int, int]]:
    """First and end of each batch. lengths: ascending."""
    first = 0
    while first < len(lengths):
        end = first + multiple
        while end < len(lengths) and 2 * (end + multiple - first) * lengths[end + multiple - 1] <= most_tokens:
            end += multiple
        yield first, end
        first = end
