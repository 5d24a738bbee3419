"""Text to rows of tokens: source -> tokenizer -> rows, prepared on disk before training or streamed during it.

`open_dataset(config)` opens the data, and training reads it through `reader_of` and `TrainLoader`. docs/data.md lists
the guarantees. Arrays are numpy's, because worker processes import this package and should start at once.
"""

from __future__ import annotations

from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset, OnMain, check_whole, open_whole
from ngpt_train.data.epochs import EpochRows, epoch_rows, many_epochs, planned_rows
from ngpt_train.data.loader import TrainLoader, reader_of
from ngpt_train.data.mixed import open_mixture
from ngpt_train.data.position import Position, Reader, data_hash, merged
from ngpt_train.data.prepared.build import prepare_dataset
from ngpt_train.data.prepared.token_files import open_tokens
from ngpt_train.data.rows import Batch, Rows, rows_of
from ngpt_train.data.streamed.streamed_text import open_streamed
from ngpt_train.data.token_sequence import Tokens
from ngpt_train.data.tokenizers import Tokenizer, load_tokenizer, read_tokenizer, write_tokenizer
from ngpt_train.data.validation_rows import chosen_rows, same_text

__all__ = [
    "Batch",
    "Dataset",
    "EpochRows",
    "Position",
    "Reader",
    "Rows",
    "Tokenizer",
    "Tokens",
    "TrainLoader",
    "chosen_rows",
    "data_hash",
    "epoch_rows",
    "load_tokenizer",
    "many_epochs",
    "merged",
    "open_dataset",
    "planned_rows",
    "prepare_dataset",
    "read_tokenizer",
    "reader_of",
    "rows_of",
    "same_text",
    "write_tokenizer",
]


def open_dataset(
    config: Config, tokenizer: Tokenizer | None = None, on_main: OnMain = lambda function: function()
) -> Dataset:
    """Opens and checks the data set of `config.data`. Text that is not streamed is prepared in the cache first.

    Several processes may call it: one prepares the text, the others wait. With data.val_fraction=1 nothing is prepared,
    and the training split is empty.
    tokenizer: used instead of `config.tokenizer`; prepared shards keep their own.
    on_main: for streamed text in several processes. It runs a function on one process and returns the result on all.
    The function may list, download and tokenize for hours, so no collective with a time limit may wait for it.
    Raises ConfigError without `data.path`, and DataError if the text, a file or the tokenizer is faulty, or if a split
    is shorter than a row.
    """
    data = config.data
    if data.val_fraction == 1:
        check_whole(config)
    if data.kind == "mixture":
        return open_mixture(config, tokenizer, on_main)
    if data.streamed:
        return open_streamed(config, tokenizer, on_main)
    if data.val_fraction == 1:
        return open_whole(config, tokenizer)
    return open_tokens(config, tokenizer) if data.kind == "tokens" else prepare_dataset(config, tokenizer=tokenizer)
