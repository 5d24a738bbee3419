"""Files of this machine as shards for virtual streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ngpt_train.core.errors import DataError
from ngpt_train.data.hashes import FileHashes, canonical_hash
from ngpt_train.data.sources.readers import extension
from ngpt_train.data.streamed.shard_cache import Shard

DOCUMENTS_SHARD = 1 << 20  # bytes of files of one document that share a shard


def local_shards(files: list[Path], settings: dict[str, str], hashes: FileHashes) -> tuple[Shard, ...]:
    """A shard for each file; files of one document share some, in the order of their paths.

    A shard's identity is that of its files, their kind and sha256, and that of `settings`, which decide with it what is
    read.
    """
    root = Path(os.path.commonpath([file.parent for file in files]))
    groups: list[list[Path]] = [[]]
    size = 0
    identities = {file: _identity(file, hashes) for file in files}
    for file in files:
        if groups[-1] and (size >= DOCUMENTS_SHARD or not _is_a_document(file) or not _is_a_document(groups[-1][-1])):
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.stat().st_size
    return tuple(_shard(group, root, settings, [identities[file] for file in group]) for group in groups)


def _is_a_document(file: Path) -> bool:
    return extension(file).split(".")[1:2] not in (["jsonl"], ["parquet"])


def _shard(files: list[Path], root: Path, settings: dict[str, str], identities: list[list[Any]]) -> Shard:
    name = str(files[0].relative_to(root)) + (f" to {files[-1].relative_to(root)}" if len(files) > 1 else "")
    identity = canonical_hash([settings, identities])
    return Shard(name, identity, tuple(map(str, files)))


def _identity(file: Path, hashes: FileHashes) -> list[Any]:
    try:
        return [extension(file), hashes.sha256(file)]
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
