"""The number of rows in an epoch, and warnings for text that is read many times or repeats within an epoch."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import sources_of
from ngpt_train.core.errors import DataError
from ngpt_train.data.dataset import Dataset, Tokens
from ngpt_train.data.mixed import Mixed
from ngpt_train.data.rows import row_format, rows_of
from ngpt_train.data.shard_cache import OpenShards
from ngpt_train.data.sources import open_source
from ngpt_train.data.sources.source import text_size
from ngpt_train.data.streamed_text import StreamSettings
from ngpt_train.data.token_files import count_tokens

logger = logging.getLogger(__name__)

# Up to four epochs train almost as well as new text, later ones less and less (Muennighoff et al. 2023, Scaling
# Data-Constrained Language Models).
MANY_EPOCHS = 4
# Measured bytes of OpenWebText per token: 4.42 with GPT-2's 50,257 pieces, 4.04 with Mistral's 32,000, 3.44 with a
# model of 4,096 pieces trained from the text. So each doubling of the vocabulary adds about 0.27.
BYTES_PER_TOKEN, VOCABULARY, BYTES_PER_DOUBLING = 3.4, 4096, 0.27
# From the published sizes: 5.2 for WikiText-103, 5.4 for Penn Treebank, white space and line ends included.
BYTES_PER_WORD = 5.3
# A stream with less text than the others enters its second epoch first, so some text is read twice before other text is
# read once. In several shards of more than MOST_BYTES the streams have nearly the same size, and the check is left out.
MOST_BYTES = 64_000_000
TOLERATED = 0.05  # share of an epoch's rows


class EpochRows(NamedTuple):
    """The size of a source."""

    rows: float  # of one epoch
    share: float  # of the run's rows
    exact: bool  # False for an estimate

    def epochs(self, rows: float) -> float:
        """Epochs of the source in the first `rows` rows of a run, rows of other sources included."""
        return rows * self.share / self.rows


def epoch_rows(data: Dataset, config: Config) -> dict[str, EpochRows]:
    """The rows of each source by name. Without a mixture the only name is empty.

    Exact for prepared tokens, an estimate for streamed text: decoded shards have a known size, the others an estimated
    one, and the held-out text gives the bytes per token.
    """
    if isinstance(data.train, Mixed):
        parts = zip(data.train.mixture.names, data.train.mixture.shares, data.train.sources, strict=True)
        return {name: epoch_rows(source, config)[""]._replace(share=share) for name, share, source in parts}
    if isinstance(data.train, Tokens):
        return {"": EpochRows(len(rows_of(data.train, config)), 1.0, exact=True)}
    held_out = data.validation
    n_bytes = int(data.tokenizer.n_bytes[held_out.ids(0, len(held_out))].sum())
    text = data.train.about_bytes() * (1 - data.train.val_fraction)
    tokens = text * len(held_out) / max(1, n_bytes)
    rows = tokens / config.model.context
    if row_format(config, held_out.eos).source_context is not None:  # a row is a document that is long enough
        rows = tokens * len(rows_of(held_out, config)) / len(held_out)
    return {"": EpochRows(max(1.0, rows), 1.0, exact=False)}


def planned_rows(config: Config) -> dict[str, EpochRows | None]:
    """`epoch_rows` from file sizes alone, without a network and before the text is opened; None if unknown. Exact only
    for prepared tokens with `data.pack=concat`. `model.vocab_size` has to be a number."""
    return {name: _planned(replace(config, data=data), share) for name, share, data in sources_of(config.data)}


def _planned(config: Config, share: float) -> EpochRows | None:
    data = config.data
    if data.objective not in ("next_token", "masked"):
        return None  # a row is a document of sufficient length, an example or a pair, and their number is unknown
    if data.on_hub and data.text_gb is None:
        return None  # only the hub knows
    try:
        if data.kind == "tokens":
            tokens = count_tokens(config)
        else:
            files = open_source(data).files if data.text_gb is None else []
            n_bytes = sum(text_size(file, file.stat().st_size) for file in files) + 1e9 * (data.text_gb or 0)
            tokens = round(n_bytes * (1 - data.held_out_share) / bytes_per_token(config))
    except (DataError, OSError, KeyError, TypeError):
        return None  # `train` names the fault of the files
    exact = data.kind == "tokens" and data.pack == "concat"
    return EpochRows(max(1, math.ceil(tokens / config.model.context)), share, exact)


def bytes_per_token(config: Config) -> float:
    """An estimate from the vocabulary size, unless tokens are bytes or words."""
    if config.tokenizer.kind == "bytes":
        return 1.0
    if config.tokenizer.kind == "words":
        return BYTES_PER_WORD
    doublings = math.log2(int(config.model.vocab_size) / VOCABULARY)
    return max(1.0, BYTES_PER_TOKEN + BYTES_PER_DOUBLING * doublings)


def many_epochs(sizes: Mapping[str, EpochRows | None], config: Config) -> Iterator[str]:
    """Warns of each source with more than MANY_EPOCHS epochs in train.steps. Of pairs a batch has any number."""
    train, context = config.train, config.model.context
    if config.data.translation_field is not None:
        return
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


def warn_of_repeats(text: OpenShards, settings: StreamSettings) -> None:
    """Warns if more than TOLERATED of the first epoch's rows repeat text. Opens the shards."""
    n_bytes = 0
    for shard in range(text.n_shards):
        n_bytes += text.documents(shard).header["bytes"]
        if n_bytes > MOST_BYTES and shard + 1 < text.n_shards:
            return
    share = repeated_share(text, settings)
    if share <= TOLERATED:
        return
    fewer = settings.n_streams // 2
    while (share_of_fewer := repeated_share(text, replace(settings, n_streams=fewer))) > TOLERATED:
        fewer //= 2  # nothing repeats in one stream
    logger.warning(
        "data.streams=%d: that many streams share the text of %d documents unevenly. Up to %.0f %% of the rows of the "
        "first epoch repeat text that was read before; with data.streams=%d, in a new run, up to %.0f %% do",
        settings.n_streams,
        sum(text.n_documents(shard) for shard in range(text.n_shards)),
        100 * share,
        fewer,
        100 * share_of_fewer,
    )


def repeated_share(text: OpenShards, settings: StreamSettings) -> float:
    """At most this share of the first epoch's rows repeats text: the bytes by which streams are below the mean."""
    sizes = np.zeros(settings.n_streams)
    for window in range(settings.n_windows(text.n_shards)):
        shards = settings.shards(text.n_shards, 0, window)
        ends = {shard: text.training_bytes(shard) for shard in shards if text.n_documents(shard)}
        pieces = settings.pieces([(s, len(ends[s]) - 1) for s in ends], 0, window)
        streams = (np.arange(len(pieces)) - settings.first_place(0, 0, window)) % settings.n_streams
        np.add.at(sizes, streams, [ends[piece.shard][piece.last] - ends[piece.shard][piece.first] for piece in pieces])
    mean = sizes.mean()
    return float(np.maximum(mean - sizes, 0).sum() / sizes.sum()) if mean else 0.0
