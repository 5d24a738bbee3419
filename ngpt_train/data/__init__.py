"""Text to rows of tokens: source -> tokenizer -> shards -> shuffled rows.

`open_dataset(config)` is the way in; docs/data.md says what is promised.
"""

from __future__ import annotations

from pathlib import Path

from ngpt_train.config.keys import ConfigError
from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset, cache_directory, open_prepared, open_tokens
from ngpt_train.data.hashes import FileHashes
from ngpt_train.data.loader import TrainLoader
from ngpt_train.data.prepare import prepare_shards
from ngpt_train.data.prepared import Rows, rows_of
from ngpt_train.data.shards import Tokens
from ngpt_train.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer, write_tokenizer

__all__ = [
    "Dataset",
    "Rows",
    "Tokenizer",
    "Tokens",
    "TrainLoader",
    "load_tokenizer",
    "open_dataset",
    "prepare_dataset",
    "read_tokenizer",
    "rows_of",
    "write_tokenizer",
]


def open_dataset(config: Config, tokenizer: Tokenizer | None = None) -> Dataset:
    """The tokens that `config.data` names, checked. Text is prepared in the cache unless it is there.

    tokenizer: to use in place of the one that `config.tokenizer` describes; prepared shards bring their own.
    Needs no process group; of several processes that call it at once, one prepares and the others wait.
    Raises ConfigError without `data.path`, DataError if anything is wrong with the text, the files or the
    tokenizer, or if a split is shorter than a row.
    """
    if config.data.kind != "tokens":
        return prepare_dataset(config, tokenizer=tokenizer)
    if config.data.path is None:
        raise ConfigError("data.path=null: data=tokens needs the directory of the shards, as data.path=DIRECTORY")
    hashes = FileHashes(cache_directory(config))
    return _checked(open_tokens(config, hashes, tokenizer), config, hashes)


def prepare_dataset(config: Config, out: Path | None = None, tokenizer: Tokenizer | None = None) -> Dataset:
    """Prepares the text that `config.data` names in `out`, by default the cache, unless it is there; opens it."""
    hashes = FileHashes(cache_directory(config))
    return _checked(open_prepared(prepare_shards(config, hashes, out, tokenizer), hashes), config, hashes)


def _checked(dataset: Dataset, config: Config, hashes: FileHashes) -> Dataset:
    for split in (dataset.train, dataset.validation):
        rows_of(split, config)
    hashes.save()
    return dataset
