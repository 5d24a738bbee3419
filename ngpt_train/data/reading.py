"""From a data set to the rows that this rank trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.dataset import Dataset, Mixed
from ngpt_train.data.loader import PreparedReader, Reader
from ngpt_train.data.mixture import MixtureReader, Turns
from ngpt_train.data.prepared.shards import Tokens
from ngpt_train.data.prepared_rows import rows_of
from ngpt_train.data.rows import row_format
from ngpt_train.data.streamed.streams import Cursor
from ngpt_train.data.streamed.workers import Start, StreamReader

ENDLESS = 2**62


def reader_of(
    data: Dataset, config: Config, rank: int = 0, world_size: int = 1, state: Mapping[str, Any] | None = None
) -> Reader:
    """The training rows of rank `rank`, from `state` on, which a checkpoint holds (`merged`).

    Raises ConfigError for a number of ranks that does not divide the streams, DataError for the state of other data.
    """
    if isinstance(data.train, Tokens):
        return PreparedReader(rows_of(data.train, config), config.run.seed)
    streams = config.data.streams
    if streams % world_size:
        raise ConfigError(f"data.streams={streams}: {world_size} ranks cannot share the streams evenly")
    rows = 0 if state is None else int(state["rows"])
    first = rows + (rank - rows) % world_size
    if not isinstance(data.train, Mixed):
        return _reader_of_source(data, config, rank, world_size, range(first, ENDLESS, world_size), state, "")
    mixture = data.train.mixture
    taken = np.stack([_stored(state, f"{name}/rows", streams, 1)[:, 0] for name in mixture.names])
    readers = [
        _reader_of_source(
            part, config, rank, world_size, Turns(mixture, index, first, world_size, taken[index]), state, f"{name}/"
        )
        for index, (name, part) in enumerate(zip(mixture.names, data.train.parts, strict=True))
    ]
    return MixtureReader(mixture, readers, taken, range(rank, streams, world_size))


def _reader_of_source(
    data: Dataset,
    config: Config,
    rank: int,
    world_size: int,
    numbers: Iterable[int],
    state: Mapping[str, Any] | None,
    prefix: str,
) -> Reader:
    """The rows `numbers` of one source, whose cursors `state` has under `prefix`."""
    if isinstance(data.train, Tokens):
        return PreparedReader(rows_of(data.train, config), config.run.seed)
    assert not isinstance(data.train, Mixed)
    streams = config.data.streams
    cursors = _stored(state, f"{prefix}cursors", streams, len(Cursor._fields))
    left_out = {} if state is None else state["skipped_shards"]
    skipped = {shard.removeprefix(prefix): problem for shard, problem in left_out.items() if shard.startswith(prefix)}
    return StreamReader(
        data.train,
        row_format(config, data.tokenizer.eos),
        numbers,
        Start(cursors, skipped),
        (rank, world_size),
        config.data.workers,
        config.data.prefetch,
    )


def _stored(state: Mapping[str, Any] | None, name: str, streams: int, width: int) -> NDArray[np.int64]:
    """Integers (streams, width) of a checkpoint, zeros at the start."""
    if state is None:
        return np.zeros((streams, width), np.int64)
    stored = np.array(state["cursors"].get(name, []), np.int64)
    if stored.shape != (streams, width):
        raise DataError(f"the checkpoint does not say where its {streams} streams are ({name}): it is of other data")
    return stored
