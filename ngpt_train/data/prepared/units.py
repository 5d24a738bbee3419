"""A text cut into units, which processes tokenize side by side.

The cuts decide which process reads what, and nothing that is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ngpt_train.data.hashes import canonical_hash
from ngpt_train.data.sources.readers import extension
from ngpt_train.data.sources.source import Hash, Source
from ngpt_train.data.sources.text import Shard

# Bytes of text in a unit: enough that its start costs nothing, little enough that all processes end together.
UNIT_BYTES = 1 << 23
# What text is compressed to, roughly.
COMPRESSED = 1 / 3


@dataclass(frozen=True)
class Unit:
    """What one process tokenizes at a time, and its size: roughly bytes of text where that is known, else 1."""

    shard: Shard
    size: int


def units_of(source: Source, sha256: Hash) -> list[Unit]:
    """The text in units, in order. Raises what `sha256` raises."""
    return _cut(source.files, sha256) if source.files else [Unit(shard, 1) for shard in source.shards]


def _cut(files: Sequence[Path], sha256: Hash) -> list[Unit]:
    """Large files in parts where their format allows it, small ones together."""
    units: list[Unit] = []
    group: list[Path] = []
    size = 0

    def end_group() -> None:
        nonlocal group, size
        if group:
            identity = canonical_hash([[extension(file), sha256(file)] for file in group])
            units.append(Unit(Shard(str(group[0]), identity, tuple(map(str, group))), size))
        group, size = [], 0

    for file in files:
        n_bytes = _text_size(file)
        if n_bytes > UNIT_BYTES and (parts := _parts(file)):
            end_group()
            content = sha256(file)
            for part, part_size in parts:
                identity = canonical_hash([extension(file), content, part])
                units.append(Unit(Shard(str(file), identity, (str(file),), part), part_size))
            continue
        if size + n_bytes > UNIT_BYTES:
            end_group()
        group.append(file)
        size += n_bytes
    end_group()
    return units


def _text_size(file: Path) -> int:
    plain = file.suffix.lower() in (".txt", ".jsonl", ".py")
    return round(file.stat().st_size / (1 if plain else COMPRESSED))


def _parts(file: Path) -> list[tuple[tuple[int, int], int]]:
    """Each part of a file (see `Shard.part`) with its size; empty where the file is read as a whole."""
    if extension(file) == ".jsonl":
        n_bytes = file.stat().st_size
        starts = [*range(0, n_bytes, UNIT_BYTES), n_bytes]
        return [((start, end), end - start) for start, end in itertools.pairwise(starts)]
    return _row_groups(file) if extension(file) == ".parquet" else []


def _row_groups(file: Path) -> list[tuple[tuple[int, int], int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return []  # the reader will say what is wrong
    parts = []
    start = size = 0
    for group in range(footer.num_row_groups):
        columns = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
        size += round(sum(column.total_compressed_size for column in columns) / COMPRESSED)
        if size >= UNIT_BYTES or group + 1 == footer.num_row_groups:
            parts.append(((start, group + 1), size))
            start, size = group + 1, 0
    return parts
