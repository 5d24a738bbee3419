"""Where documents come from: an ordered list of files and a way to read one.

A source can be read again and again, whole or file by file, always in the same order; nothing here
holds more than one file's batch of text in memory.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import ConfigError, DataError
from ngpt_train.config.schema import DataConfig
from ngpt_train.data.hashes import canonical_hash
from ngpt_train.data.readers import EXTENSIONS, extension, read_file
from ngpt_train.data.shard_cache import Shard

logger = logging.getLogger(__name__)

DOCUMENTS_SHARD = 1 << 20  # bytes of files of one document that share a shard
IDENTIFYING = 1 << 16  # bytes at either end of a file
NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """Text as files in a fixed order. `settings` is what, besides their bytes, decides the documents."""

    kind: str
    files: list[Path]
    read: Callable[[Path], Iterator[str]]
    settings: dict[str, str]

    def documents(self) -> Iterator[str]:
        for file in self.files:
            yield from self.read(file)


def open_source(data: DataConfig) -> Source:
    """The text that `data.kind` (embedded or local) names. Lists files, reads none."""
    if data.kind == "embedded":
        return _embedded()
    if data.path is None:
        raise ConfigError("data.path=null: data=local needs the file, directory or glob of the text, as data.path=PATH")
    files = list_files(data.path)
    return Source("local", files, partial(read_file, text_field=data.text_field), {"text_field": data.text_field})


@dataclass(frozen=True)
class LocalText:
    """Text of files that every machine of the run sees, shard by shard."""

    kind: str
    text_field: str

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        for file in shard.files:
            path = Path(file)
            yield from _read_library_file(path) if self.kind == "embedded" else read_file(path, self.text_field)


def local_shards(data: DataConfig) -> tuple[LocalText, tuple[Shard, ...]]:
    """The files of `data` (embedded or local) as shards; files of one document share some, in the order of their paths.

    A shard's identity is that of its files: their kind, size, and what they hold at either end.
    """
    source = open_source(data)
    root = Path(os.path.commonpath([file.parent for file in source.files]))
    groups: list[list[Path]] = [[]]
    size = 0
    for file in source.files:
        if groups[-1] and (size >= DOCUMENTS_SHARD or not _is_a_document(file) or not _is_a_document(groups[-1][-1])):
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.stat().st_size
    shards = tuple(_shard(group, root, source.settings) for group in groups)
    return LocalText(data.kind, data.text_field), shards


def _is_a_document(file: Path) -> bool:
    return extension(file).split(".")[1:2] not in (["jsonl"], ["parquet"])


def _shard(files: list[Path], root: Path, settings: dict[str, str]) -> Shard:
    name = str(files[0].relative_to(root)) + (f" to {files[-1].relative_to(root)}" if len(files) > 1 else "")
    identity = canonical_hash([settings, [_identity(file) for file in files]])
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


def list_files(path: str) -> list[Path]:
    """Text files that a file name, directory (searched recursively) or glob stands for, sorted by path.

    Raises DataError if there is none.
    """
    given = Path(path).expanduser()
    allowed = ", ".join(EXTENSIONS)
    if given.is_file():
        if not extension(given):
            raise DataError(f"data.path={path}: unknown kind of file; known are {allowed}")
        return [given]
    if given.is_dir():
        found = [given]
    else:
        found = [Path(match) for match in glob.glob(str(given), recursive=True)]
        if not found:
            raise DataError(f"data.path={path}: no such file or directory, and no file matches it as a pattern")
    candidates = {file for match in found for file in (_visible_files(match) if match.is_dir() else [match])}
    files = sorted(file for file in candidates if extension(file))
    if not files:
        raise DataError(f"data.path={path}: holds no text; read are files that end in {allowed}")
    ignored = sorted(candidates - set(files))
    if ignored:
        logger.warning("data.path=%s: %d other files are not read, such as %s", path, len(ignored), ignored[0])
    return files


def _visible_files(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(directory).parts):
            yield file


def _embedded() -> Source:
    """The standard library of the running Python: its .py files without tests, and the topics of `help()`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for directory, subdirectories, names in os.walk(library):
        subdirectories[:] = [name for name in subdirectories if name not in NOT_LIBRARY]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"data=embedded: this Python keeps no .py files in {library}; use another one, or data=local data.path=PATH"
        )
    return Source("embedded", sorted(files), _read_library_file, {"python": platform.python_version()})


def _read_library_file(path: Path) -> Iterator[str]:
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name]
        return
    try:
        with tokenize.open(path) as file:  # a module may declare an encoding of its own
            text = file.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        logger.warning("%s is left out of the embedded corpus: %s", path, error)
        return
    yield text
