"""Files of this machine as shards for virtual streams."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import DataError
from ngpt_train.data.hashes import canonical_hash
from ngpt_train.data.readers import extension
from ngpt_train.data.shard_cache import Shard

DOCUMENTS_SHARD = 1 << 20  # bytes of files of one document that share a shard
IDENTIFYING = 1 << 16  # bytes at either end of a file


def local_shards(files: list[Path], settings: dict[str, str]) -> tuple[Shard, ...]:
    """A shard for each file; files of one document share some, in the order of their paths.

    A shard's identity is that of its files: their kind, size, and what they hold at either end; and that of `settings`,
    which decide with it what is read.
    """
    root = Path(os.path.commonpath([file.parent for file in files]))
    groups: list[list[Path]] = [[]]
    size = 0
    identities = {file: _identity(file) for file in files}
    for file in files:
        if groups[-1] and (size >= DOCUMENTS_SHARD or not _is_a_document(file) or not _is_a_document(groups[-1][-1])):
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += identities[file][1]
    return tuple(_shard(group, root, settings, [identities[file] for file in group]) for group in groups)


def _is_a_document(file: Path) -> bool:
    return extension(file).split(".")[1:2] not in (["jsonl"], ["parquet"])


def _shard(files: list[Path], root: Path, settings: dict[str, str], identities: list[list[Any]]) -> Shard:
    name = str(files[0].relative_to(root)) + (f" to {files[-1].relative_to(root)}" if len(files) > 1 else "")
    identity = canonical_hash([settings, identities])
    return Shard(name, identity, tuple(map(str, files)))


def _identity(file: Path) -> list[Any]:
    """Of a file, without reading all of it. A parquet file keeps the statistics of all of its pages at its end."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest = hashlib.blake2b(opened.read(IDENTIFYING))
            opened.seek(max(0, size - IDENTIFYING))
            digest.update(opened.read())
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    return [extension(file), size, digest.hexdigest()]
