"""Which documents a virtual stream reads, in which order: a function of the shards, the seed and the stream alone.

An epoch takes the shards in a shuffled order, `open_shards` at a time: a window. The documents of a window are cut into
pieces, neighbours within a shard; the pieces are shuffled and dealt out to the streams. So a stream needs the
shards of one window at a time and no other stream's state, and whoever reads it gets the same documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ngpt_train.data.permutation import keyed_hash, keyed_order, shuffled

# A window has at least so many pieces for each stream, so that streams stay together to within a fraction of a window.
PIECES_PER_STREAM = 4


class Piece(NamedTuple):
    """Documents `first` to `last - 1` of a shard."""

    shard: int
    first: int
    last: int


def n_windows(n_shards: int, open_shards: int) -> int:
    """Windows of an epoch."""
    return -(-n_shards // open_shards)


def window_shards(n_shards: int, open_shards: int, epoch: int, window: int, seed: int) -> list[int]:
    """The shards of a window, by their numbers in the manifest."""
    places = np.arange(window * open_shards, min((window + 1) * open_shards, n_shards))
    return shuffled(places + epoch * n_shards, n_shards, seed).tolist()


def window_pieces(sizes: Iterable[tuple[int, int]], n_streams: int, epoch: int, window: int, seed: int) -> list[Piece]:
    """All pieces of a window, shuffled. sizes: (shard, its documents)."""
    sizes = list(sizes)
    step = max(1, sum(n for _, n in sizes) // (n_streams * PIECES_PER_STREAM))
    pieces = [Piece(shard, first, min(first + step, n)) for shard, n in sizes for first in range(0, n, step)]
    return [pieces[i] for i in keyed_order(len(pieces), seed, epoch, window)]


def first_place(n_streams: int, stream: int, epoch: int, window: int, seed: int) -> int:
    """Where among a window's pieces those of a stream begin; it has every `n_streams`-th from there.

    Which stream begins is drawn anew for each window, so that none is short of pieces in all of them.
    """
    return (stream - keyed_hash(seed, epoch, window)) % n_streams


def document_order(piece: Piece, epoch: int, seed: int) -> list[int]:
    """The documents of a piece in the order in which they are read, by their numbers in the shard."""
    return [piece.first + i for i in keyed_order(piece.last - piece.first, seed, epoch, *piece)]
