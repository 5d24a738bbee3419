"""Opens examples with a label: the texts of files or of the hub, and their labels."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import IGNORED, MILLION
from ngpt_train.core.errors import DataError
from ngpt_train.data.cache_files import canonical_hash
from ngpt_train.data.dataset import Dataset, Examples, path_of
from ngpt_train.data.sources import documents_by_split
from ngpt_train.data.tokenizers.tokenizer import Ids, Tokenizer


def open_labelled(config: Config, tokenizer: Tokenizer) -> Dataset:
    """Both splits of examples; with data.val_fraction=1 all validate. Raises DataError for a faulty text or label, and
    for a split without examples."""
    data, path = config.data, path_of(config)
    source, documents = documents_by_split(data)
    splits = [_examples(split, path, of_split, config, tokenizer) for split, of_split in documents.items()]
    found = canonical_hash([tokenizer.fingerprint, tokenizer.eos, data.labels, documents])
    return Dataset(
        splits[0], splits[1], tokenizer, found, path, {"source": {"kind": source.kind, "revision": source.revision}}
    )


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
