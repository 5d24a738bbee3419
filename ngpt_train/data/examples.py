"""Opens what is in memory as a whole: examples with a label, and pairs of a text and its translation."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED, MILLION
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_json, write_json
from ngpt_train.data.cache_files import build_directory, cache_directory, canonical_hash
from ngpt_train.data.dataset import Dataset, Examples, Pairs, path_of
from ngpt_train.data.sources import documents_by_split
from ngpt_train.data.tokenizers import load_tokenizer, read_tokenizer, tokenizer_key, write_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Ids, Tokenizer

logger = logging.getLogger(__name__)


def open_labelled(config: Config, tokenizer: Tokenizer) -> Dataset:
    """Both splits of examples; with data.val_fraction=1 all validate. Raises DataError for a faulty text or label, and
    for a split without examples."""
    data, path = config.data, path_of(config)
    source, documents = documents_by_split(data)
    train, validation = (_examples(split, path, given, config, tokenizer) for split, given in documents.items())
    found = canonical_hash([tokenizer.fingerprint, tokenizer.eos, data.labels, documents])
    manifest = {"source": {"kind": source.kind, "revision": source.revision}}
    return Dataset(train, validation, tokenizer, found, path, manifest)


def _examples(split: str, path: Path, documents: list[list[Any]], config: Config, tokenizer: Tokenizer) -> Examples:
    texts: list[list[Ids]] = []
    labels: list[int] = []
    for *fields, label in documents:
        texts.append([tokenizer.encode(text) for text in fields])
        labels.append(label_of(label, config.data.labels, path))
    if not texts and (split == "validation" or config.data.val_fraction < 1):
        raise DataError(f"{path}: the {split} split has no example; name files with data.val_files, or add examples")
    return Examples(split, path, tokenizer.eos, texts, np.array(labels, np.int64))


def label_of(value: object, labels: Sequence[str] | None, path: Path) -> int:
    """The class of a label, or a number in millionths. Raises DataError for a label that is none of `labels`."""
    if labels is not None:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text in labels:
            return list(labels).index(text)
        raise DataError(
            f"{path}: the label {value!r} is none of data.labels={list(labels)}; add it, or correct the file"
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < 1e9:
        raise DataError(f"{path}: the label {value!r} is no number; name the classes with data.labels=[...]")
    millionths = round(number * MILLION)
    return millionths + (millionths == IGNORED)


def open_pairs(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """Both splits. Without a tokenizer or a file of one, a SentencePiece model is trained on both sides of the training
    text. Pairs that do not fit into a row, or have an empty side, are left out. With data.val_fraction=1 all others
    validate. Raises DataError for a faulty text, and for a split without pairs."""
    path = path_of(config)
    source, texts = documents_by_split(config.data)
    tokenizer = tokenizer or _tokenizer_of_pairs(config, texts["train"])
    train, validation = (_pairs(split, path, given, config, tokenizer) for split, given in texts.items())
    found = canonical_hash([tokenizer.fingerprint, tokenizer.eos, config.model.context // 2, texts])
    manifest = {"source": {"kind": source.kind, "revision": source.revision}}
    return Dataset(train, validation, tokenizer, found, path, manifest)


def _tokenizer_of_pairs(config: Config, texts: list[list[str]]) -> Tokenizer:
    """The tokenizer of the config. One that is made from the text stays in the cache."""
    if not config.tokenizer.from_text:
        return load_tokenizer(config.tokenizer)
    key = canonical_hash([tokenizer_key(config.tokenizer), texts])
    directory = cache_directory(config) / "tokens" / f"pairs-{key[:16]}"

    def build(directory: Path) -> None:
        logger.info("making tokenizer=%s of both sides", config.tokenizer.kind)
        made = load_tokenizer(config.tokenizer, corpus=(side for pair in texts for side in pair))
        write_json(directory / "tokenizer.json", write_tokenizer(made, directory))

    build_directory(directory, build)
    return read_tokenizer(directory, read_json(directory / "tokenizer.json"))


def _pairs(split: str, path: Path, texts: list[list[str]], config: Config, tokenizer: Tokenizer) -> Pairs:
    pairs = []
    for sides in texts:
        source, translation = (tokenizer.encode(text) for text in sides)
        if len(source) and len(translation) and 1 + max(len(source), len(translation)) <= config.model.context // 2:
            pairs.append((source, translation))
    if not pairs and (split == "validation" or config.data.val_fraction < 1):
        raise DataError(
            f"{path}: no pair of the {split} split fits into a row, whose halves have model.context / 2 = "
            f"{config.model.context // 2} tokens; raise model.context, name files with data.val_files, or add pairs"
        )
    if len(pairs) < len(texts):
        left_out = f"{len(texts) - len(pairs):,} of {len(texts):,} pairs"
        logger.info("%s of the %s split are left out: a side is empty or longer than half a row", left_out, split)
    return Pairs(split, path, tokenizer.eos, pairs, texts if split == "validation" else ())
