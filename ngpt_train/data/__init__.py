"""Text to rows of tokens: source -> tokenizer -> rows, prepared on disk before training or streamed during it.

`open_dataset(config)` opens the data, and training reads it through `reader_of` and `TrainLoader`. docs/data.md lists
the guarantees. Arrays are numpy's, because worker processes import this package and should start at once.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.cache_files import canonical_hash
from ngpt_train.data.dataset import Dataset, OnMain, Pairs, Tokens, path_of
from ngpt_train.data.epochs import warn_of_repeats
from ngpt_train.data.examples import open_labelled, open_pairs
from ngpt_train.data.loader import (
    ENDLESS,
    MaskedReader,
    PairReader,
    PreparedReader,
    Reader,
    Share,
    TrainLoader,
    check_position,
    merged,
    stored_integers,
)
from ngpt_train.data.masks import masks_of
from ngpt_train.data.mixed import Mixed, MixtureReader, Turns, open_mixture
from ngpt_train.data.prepared_text import prepare_dataset
from ngpt_train.data.rows import rows_of
from ngpt_train.data.sources import open_source
from ngpt_train.data.streamed_text import Cursor, Start, StreamedText, open_streamed
from ngpt_train.data.token_files import open_tokens
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.data.tokenizers.tokenizer import Ints, Tokenizer, with_eos
from ngpt_train.data.workers import OnWait, StreamReader

__all__ = ["Dataset", "TrainLoader", "merged", "open_dataset", "prepare_dataset", "reader_of"]


def open_dataset(
    config: Config, tokenizer: Tokenizer | None = None, on_main: OnMain = lambda function: function()
) -> Dataset:
    """Opens and checks the data set of `config.data`. Text that is not streamed is prepared in the cache first.

    Several processes may call it: one prepares the text, the others wait. With data.val_fraction=1 nothing is prepared,
    and the training split is empty.
    tokenizer: used instead of `config.tokenizer`; prepared shards keep their own.
    on_main: for streamed text in several processes. It runs a function on one process and returns the result on all.
    The function may list, download and tokenize for hours, so no collective with a time limit may wait for it.
    Raises DataError if the text, a file or the tokenizer is faulty, or if a split is shorter than a row, and
    ConfigError for a faulty data.repo and for data.val_fraction=1 of text that has a validation split of its own.
    """
    data = config.data
    if (data.label_field is None) != (config.model.n_classes is None):
        raise ConfigError(
            f"data.label_field={data.label_field}, model.n_classes={config.model.n_classes}\n  Name the task's "
            "examples: data.label_field, data.text_field and data.labels, or choose another checkpoint"
        )
    if (data.translation_field is None) == (config.model.objective == "translation"):
        raise ConfigError(
            f"data.translation_field={data.translation_field}, model.name={config.model.name}\n  Pairs are for an "
            "encoder-decoder: choose model=composed_encoder_decoder data=pairs, or another checkpoint"
        )
    if data.label_field is not None:
        return open_labelled(config, tokenizer or load_tokenizer(config.tokenizer))
    if data.translation_field is not None:
        return open_pairs(config, tokenizer)
    if data.val_fraction == 1:
        check_whole(config)
    if data.kind == "mixture":
        return open_mixture(config, tokenizer, on_main)
    if data.streamed:
        return open_streamed(config, tokenizer, on_main)
    if data.val_fraction == 1:
        return open_whole(config, tokenizer)
    return open_tokens(config, tokenizer) if data.kind == "tokens" else prepare_dataset(config, tokenizer=tokenizer)


def check_whole(config: Config) -> None:
    """Raises ConfigError unless all of the text can be validation text (data.val_fraction=1)."""
    data = config.data
    if data.kind in ("tokens", "mixture") or data.val_files is not None:
        named, fix = f"data.kind={data.kind}", "Name the text with data=local data.path=FILE"
        if data.val_files is not None:
            named, fix = f"data.val_files={data.val_files}", "Set data.val_files=null, or leave data.val_fraction out"
        raise ConfigError(f"data.val_fraction=1, {named}: has a validation split of its own\n  {fix}")


def open_whole(config: Config, tokenizer: Tokenizer | None) -> Dataset:
    """All of the text as the validation split, tokenized in memory, which takes far less time than its evaluation.
    Raises DataError if the text cannot be read or is shorter than a row."""
    data, path, context = config.data, path_of(config), config.model.context
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    documents = [with_eos(tokenizer, text) for text in open_source(data).documents() if text or data.keep_empty]
    n_tokens = sum(map(len, documents))
    if n_tokens <= context and not config.model.source_length(context):
        raise DataError(
            f"{path}: has {n_tokens} tokens, less than one row (model.context + 1 = {context + 1}); add text, or "
            f"take documents of any length with evaluate.length.contexts=[{context}]"
        )
    validation = Tokens.of_documents("validation", path, documents, tokenizer.eos)
    ids = hashlib.sha256(b"".join(document.tobytes() for document in documents))
    found = canonical_hash([tokenizer.fingerprint, ids.hexdigest()])
    return Dataset(Tokens("train", path, [], tokenizer.eos), validation, tokenizer, found, path, {})


def reader_of(
    data: Dataset,
    config: Config,
    rank: int = 0,
    world_size: int = 1,
    state: Mapping[str, Any] | None = None,
    on_wait: OnWait = lambda seconds: None,
) -> Reader:
    """The training rows of rank `rank`, from the `state` of a checkpoint on (`merged`). on_wait: see `StreamReader`.

    For streamed text it fetches the shards of the first rows, so no collective with a time limit may wait for it.
    Raises DataError if the state is of other data or a shard cannot be read.
    """
    if state is not None:
        check_position(state)
    share, rows = Share(rank, world_size), 0 if state is None else int(state["rows"])
    streams = config.data.streams

    def of_text(text: Tokens | StreamedText | Mixed, numbers: Iterable[int], given: Ints, prefix: str = "") -> Reader:
        """The rows `numbers` of one source. prefix: of its cursors in `state`; given: `Start.rows`."""
        if isinstance(text, Pairs):
            return PairReader(text, config, world_size)
        if isinstance(text, Tokens):
            return PreparedReader(rows_of(text, config), config.run.seed)
        assert isinstance(text, StreamedText)
        cursors = stored_integers(state, f"{prefix}cursors", streams, len(Cursor._fields))
        left_out = {} if state is None else state["skipped_shards"]
        skipped = {name.removeprefix(prefix): problem for name, problem in left_out.items() if name.startswith(prefix)}
        start = Start(cursors, given, skipped)
        text.fetch(start, share)
        if rank == 0 and state is None:
            warn_of_repeats(text.open(), text.settings)
        return StreamReader(text, numbers, start, share, config.data, on_wait)

    reader: Reader
    if isinstance(data.train, Mixed):
        mixture = data.train.mixture
        taken = np.stack([stored_integers(state, f"{name}/rows", streams, 1)[:, 0] for name in mixture.names])
        readers = [
            of_text(source.train, Turns(mixture, share, rows, taken, index), taken[index], f"{name}/")
            for index, (name, source) in enumerate(zip(mixture.names, data.train.sources, strict=True))
        ]
        reader = MixtureReader(mixture, readers, share, rows, taken)
    else:
        # Stream s has given the rows s, s + streams, s + 2 streams, ... so far.
        given = (rows - np.arange(streams) + streams - 1) // streams
        reader = of_text(data.train, range(share.next_row(rows, world_size), ENDLESS, world_size), given)
    masks = masks_of(config, data.tokenizer)
    return reader if masks is None else MaskedReader(reader, masks, config.run.seed)
