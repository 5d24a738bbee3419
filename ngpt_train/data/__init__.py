"""Text to rows of tokens: source -> tokenizer -> rows, prepared on disk before or streamed while training.

`open_dataset(config)` is the way in, `reader_of` and `TrainLoader` what training reads; docs/data.md says what is
promised. Arrays are numpy's: worker processes import this package and should start at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ngpt_train.config.keys import ConfigError, DataError
from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset, cache_directory, open_prepared, open_tokens
from ngpt_train.data.hashes import FileHashes
from ngpt_train.data.loader import (
    Position,
    PreparedReader,
    Reader,
    TrainLoader,
    data_hash,
    merged,
    validation_rows,
)
from ngpt_train.data.prepare import prepare_shards
from ngpt_train.data.prepared import Rows, rows_of
from ngpt_train.data.rows import Batch, row_format
from ngpt_train.data.shards import Tokens
from ngpt_train.data.streamed import OnMain, open_streamed
from ngpt_train.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer, write_tokenizer
from ngpt_train.data.workers import Start, StreamReader

__all__ = [
    "Batch",
    "Dataset",
    "Position",
    "Reader",
    "Rows",
    "Tokenizer",
    "Tokens",
    "TrainLoader",
    "data_hash",
    "load_tokenizer",
    "merged",
    "open_dataset",
    "prepare_dataset",
    "read_tokenizer",
    "reader_of",
    "rows_of",
    "validation_rows",
    "write_tokenizer",
]


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
    return _checked(open_prepared(prepare_shards(config, hashes, out, tokenizer), hashes), config, hashes)


def _checked(dataset: Dataset, config: Config, hashes: FileHashes) -> Dataset:
    for split in (dataset.train, dataset.validation):
        assert isinstance(split, Tokens)
        rows_of(split, config)
    hashes.save()
    return dataset


def reader_of(
    data: Dataset, config: Config, rank: int = 0, world_size: int = 1, state: Mapping[str, Any] | None = None
) -> Reader:
    """This rank's training rows, from `state` on, which a checkpoint holds (`merged`)."""
    if isinstance(data.train, Tokens):
        return PreparedReader(rows_of(data.train, config), config.run.seed)
    settings = config.data
    if settings.streams % world_size:
        raise ConfigError(f"data.streams={settings.streams}: {world_size} ranks cannot share the streams evenly")
    start = Start(np.zeros((settings.streams, 5), np.int64), skipped={})
    rows = 0
    if state is not None:
        rows, stored = state["rows"], state["cursors"].get("text")
        if stored is None or len(stored) != settings.streams:
            raise DataError("the checkpoint does not say where its streams were: it is of a run on other data")
        start = Start(np.array(stored, np.int64), state["skipped_shards"])
    return StreamReader(
        "text",
        data.train,
        row_format(config, data.tokenizer.eos),
        range(rows + (rank - rows) % world_size, 2**62, world_size),
        start,
        (rank, world_size),
        settings.workers,
        settings.prefetch,
    )
