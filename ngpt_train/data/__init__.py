"""Text to rows of tokens: source -> tokenizer -> rows, prepared on disk before or streamed while training.

`open_dataset(config)` is the way in, `reader_of` and `TrainLoader` what training reads; docs/data.md says what is
promised. Arrays are numpy's: worker processes import this package and should start at once.
"""

from __future__ import annotations

from ngpt_train.data.epochs import EpochRows, epoch_rows, many_epochs, planned_rows
from ngpt_train.data.loader import Position, TrainLoader, data_hash, merged, reader_of
from ngpt_train.data.open import Dataset, open_dataset, prepare_dataset
from ngpt_train.data.prepared.shards import Tokens
from ngpt_train.data.rows import Batch, Reader, Rows, rows_of
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
