"""How evenly the text of an epoch falls on the streams: one with less text than the others goes on into the next epoch
while they are still in the first, so some text is read twice before other text is read once."""

from __future__ import annotations

import logging

import numpy as np

from ngpt_train.data.streamed.cache import OpenShards
from ngpt_train.data.streamed.stream import StreamSettings, first_place, n_windows, window_pieces, window_shards

logger = logging.getLogger(__name__)

# Text that is looked at; of more, no stream has much less than another.
MOST_BYTES = 64_000_000
TOLERATED = 0.05


def warn_of_repeats(text: OpenShards, settings: StreamSettings) -> None:
    """Says what share of the first epoch's rows repeats text, if that is more than TOLERATED."""
    if not is_small(text):
        return
    share = repeated_share(text, settings, settings.n_streams)
    if share <= TOLERATED:
        return
    fewer = settings.n_streams // 2
    while (share_of_fewer := repeated_share(text, settings, fewer)) > TOLERATED:  # none of one stream
        fewer //= 2
    logger.warning(
        "data.streams=%d: that many streams share the text of %d documents unevenly. Up to %.0f %% of the rows of the "
        "first epoch repeat text that was read before; with data.streams=%d, in a new run, up to %.0f %% do",
        settings.n_streams,
        sum(text.n_documents(shard) for shard in range(text.n_shards)),
        100 * share,
        fewer,
        100 * share_of_fewer,
    )


def is_small(text: OpenShards) -> bool:
    """Whether all text, whose shards are opened for it, is at most MOST_BYTES, or one shard."""
    n_bytes = 0
    for shard in range(text.n_shards):
        n_bytes += text.documents(shard).header["bytes"]
        if n_bytes > MOST_BYTES and shard + 1 < text.n_shards:
            return False
    return True


def repeated_share(text: OpenShards, settings: StreamSettings, n_streams: int) -> float:
    """Share of the first epoch's rows that repeat text, at most: the bytes that streams lack of the mean."""
    sizes = np.zeros(n_streams)
    for window in range(n_windows(text.n_shards, settings.open_shards)):
        shards = window_shards(text.n_shards, settings.open_shards, 0, window, settings.seed)
        ends = {shard: text.training_bytes(shard) for shard in shards if text.n_documents(shard)}
        pieces = window_pieces([(s, len(ends[s]) - 1) for s in ends], n_streams, 0, window, settings.seed)
        streams = (np.arange(len(pieces)) - first_place(n_streams, 0, 0, window, settings.seed)) % n_streams
        np.add.at(sizes, streams, [ends[piece.shard][piece.last] - ends[piece.shard][piece.first] for piece in pieces])
    mean = sizes.mean()
    return float(np.maximum(mean - sizes, 0).sum() / sizes.sum()) if mean else 0.0
