"""How many rows one reading of the training text has, and the warning for a run that reads it many times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import mixture_of
from ngpt_train.core.errors import DataError
from ngpt_train.data.open import Dataset, Mixed
from ngpt_train.data.prepared.foreign import count_tokens
from ngpt_train.data.prepared.shards import MANIFEST, Tokens, read_manifest
from ngpt_train.data.rows import row_format, rows_of
from ngpt_train.data.sources.local import list_files, list_library
from ngpt_train.data.sources.text import text_size

# Text that is read up to four times trains almost as well as new text, and from then on less and less (Muennighoff et
# al. 2023, Scaling Data-Constrained Language Models).
MANY_EPOCHS = 4
# Bytes of text per token, as measured: 4.42 of OpenWebText with GPT-2's 50,257 pieces, 4.04 with Mistral's 32,000,
# 3.44 with a model of 4,096 that was trained from the text. So each doubling of the vocabulary adds about 0.27.
BYTES_PER_TOKEN, VOCABULARY, BYTES_PER_DOUBLING = 3.4, 4096, 0.27
# By the published sizes: 5.2 of WikiText-103, 5.4 of Penn Treebank, white space and ends of lines included.
BYTES_PER_WORD = 5.3


class EpochRows(NamedTuple):
    """Rows of one epoch of a source, and the share of the run's rows that are the source's. exact: not an estimate."""

    rows: float
    share: float
    exact: bool

    def epochs(self, rows: float) -> float:
        """How often the source is read by the first `rows` rows of a run, those of other sources included."""
        return rows * self.share / self.rows


def epoch_rows(data: Dataset, config: Config) -> dict[str, EpochRows]:
    """Of each source of the training text, by name; without a mixture the one name is empty.

    Exact for prepared tokens. Of streamed text an estimate: its size is known of shards that are decoded on this
    machine, and estimated from the sizes of the others' files; the held-out text says how many bytes a token has.
    """
    if isinstance(data.train, Mixed):
        parts = zip(data.train.mixture.names, data.train.mixture.shares, data.train.sources, strict=True)
        return {name: epoch_rows(source, config)[""]._replace(share=share) for name, share, source in parts}
    if isinstance(data.train, Tokens):
        return {"": EpochRows(len(rows_of(data.train, config)), 1.0, exact=True)}
    held_out = data.validation
    ids = np.empty(len(held_out), np.int64)
    held_out.read(0, ids)
    n_bytes = int(data.tokenizer.n_bytes[ids].sum())
    text = data.train.about_bytes() * (1 - data.train.val_fraction)
    tokens = text * len(held_out) / max(1, n_bytes)
    if row_format(config, held_out.eos).source_context is None:
        return {"": EpochRows(max(1.0, tokens / config.model.context), 1.0, exact=False)}
    # A row is a document that is long enough.
    return {"": EpochRows(max(1.0, tokens * len(rows_of(held_out, config)) / len(held_out)), 1.0, exact=False)}


def planned_rows(config: Config) -> dict[str, EpochRows | None]:
    """The same before the text is opened, without a network and without reading text; None where it is unknown.

    Exact only for prepared tokens in rows of `data.pack=concat`. `model.vocab_size` is a number.
    """
    if config.data.kind != "mixture":
        return {"": _planned(config)}
    found: dict[str, EpochRows | None] = {}
    for source in mixture_of(config.data):
        size = _planned(replace(config, data=source.data))
        found[source.name] = None if size is None else size._replace(share=source.share)
    return found


def _planned(config: Config) -> EpochRows | None:
    data = config.data
    if data.objective == "prefix_continuation":
        return None  # a row is a document that is long enough, and how many are is not known
    try:
        tokens = _tokens_on_disk(config) if data.kind == "tokens" else None
        text = None if data.kind == "tokens" else _planned_bytes(config)
    except (DataError, OSError, KeyError, TypeError):
        return None  # `train` says what is wrong with the files
    exact = tokens is not None
    if tokens is None:
        if text is None:
            return None
        tokens = round(text * (1 - data.held_out_share) / bytes_per_token(config))
    return EpochRows(max(1, math.ceil(tokens / config.model.context)), 1.0, exact and data.pack == "concat")


def _tokens_on_disk(config: Config) -> int:
    path = Path(config.data.path or "").expanduser()
    if (path / MANIFEST).exists():
        return int(read_manifest(path)["splits"]["train"]["tokens"])
    return count_tokens(path, config.data.path, config.data.val_fraction)


def _planned_bytes(config: Config) -> float | None:
    data = config.data
    if data.text_gb is not None:
        return data.text_gb * 1e9
    if data.kind == "embedded":
        files = list_library()
    elif data.kind == "local" and data.path is not None:
        held_out = [] if data.val_files is None else list_files(data.val_files, "data.val_files")
        files = sorted(set(list_files(data.path)) - set(held_out))
    else:
        return None  # only the hub knows
    return sum(text_size(file, file.stat().st_size) for file in files)


def bytes_per_token(config: Config) -> float:
    """Roughly, by the size of the vocabulary unless tokens are bytes or words."""
    if config.tokenizer.kind == "bytes":
        return 1.0
    if config.tokenizer.kind == "words":
        return BYTES_PER_WORD
    doublings = math.log2(int(config.model.vocab_size) / VOCABULARY)
    return max(1.0, BYTES_PER_TOKEN + BYTES_PER_DOUBLING * doublings)


def many_epochs(sizes: Mapping[str, EpochRows | None], config: Config) -> Iterator[str]:
    """A warning for each source that train.steps read more than MANY_EPOCHS times."""
    train, context = config.train, config.model.context
    for name, size in sizes.items():
        if size is None or (epochs := size.epochs(train.steps * train.rows_per_step)) <= MANY_EPOCHS:
            continue
        about = "" if size.exact else "about "
        wanted = round(train.steps * train.rows_per_step * size.share)
        most = math.floor(MANY_EPOCHS * train.steps / epochs)
        fixes = ["Take more text", f"set train.steps to {most} or less" if most else "take smaller batches"]
        fixes += ["give it a smaller weight in data.mixture"] if name else []
        times = f"{epochs:,.0f}" if epochs >= 20 else f"{epochs:.1f}"
        yield (
            f"train.steps={train.steps} reads the training text{f' of {name}' if name else ''} {about}{times} times: "
            f"it has {about}{round(size.rows) * context:,} tokens, and the run asks for {wanted * context:,}. "
            f"From {MANY_EPOCHS} times on a text teaches less and less. {', or '.join(fixes)}"
        )
