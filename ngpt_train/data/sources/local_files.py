"""Text files of this machine: lists and reads them, and cuts them into shards for streaming and units for `prepare`."""

import functools
import glob
import itertools
import logging
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import DataError
from ngpt_train.data.cache_files import FileHashes, canonical_hash
from ngpt_train.data.sources.source import COMPRESSED, EXTENSIONS, Shard, Source, extension, text_size

logger = logging.getLogger(__name__)

NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
DOCUMENTS_SHARD = 1 << 20  # bytes of a shard of one-document files
# Bytes of text in a unit: large, so that its start costs nothing, but small, so that all processes end together.
UNIT_BYTES = 1 << 23


@dataclass(frozen=True)
class LocalText:
    """Reads files, or parts of them. Travels to worker processes."""

    read: Callable[..., Iterator[str]]

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The documents of a shard's files in order. Raises DataError if a file is faulty."""
        for file in shard.files:
            yield from self.read(Path(file)) if shard.part is None else self.read(Path(file), part=shard.part)


def text_files(data: DataConfig) -> tuple[list[Path], list[Path]]:
    """The files of data.path, without the held-out ones of data.val_files; and these. Of two aligned files the first
    stands for both. Raises DataError where there is none."""
    assert data.path is not None
    held_out = [] if data.val_files is None else _files_of(data, data.val_files, "data.val_files")
    files = [file for file in _files_of(data, data.path, "data.path") if file not in held_out]
    if not files:
        raise DataError(
            f"data.val_files={data.val_files}: all files of data.path={data.path}; none is left to train on"
        )
    return files, held_out


def _files_of(data: DataConfig, path: str, key: str) -> list[Path]:
    source = Path(f"{path}.{data.text_field}").expanduser()
    if data.translation_field is None or glob.glob(os.path.expanduser(path)):
        return list_files(path, key)
    if not source.is_file():
        raise DataError(f"{key}={path}: no such file, and no {source}, the first of two aligned files")
    return [source]


def list_files(path: str, key: str = "data.path") -> list[Path]:
    """The text files of a file name, directory (searched recursively) or glob, sorted by path. key: for messages.
    Raises DataError if there is none."""
    given = Path(path).expanduser()
    allowed = ", ".join(EXTENSIONS)
    if given.is_file():
        if not extension(given):
            raise DataError(f"{key}={path}: unknown kind of file; known are {allowed}")
        return [given]
    if given.exists() and not given.is_dir():
        raise DataError(f"{key}={path}: a pipe or a device; text is read from files")
    if given.is_dir():
        found = [given]
    else:
        found = [Path(match) for match in glob.glob(str(given), recursive=True)]
        if not found:
            raise DataError(f"{key}={path}: no such file or directory, and no file matches it as a pattern")
    candidates = {file for match in found for file in (_visible_files(match) if match.is_dir() else [match])}
    # A broken link is listed, so that its reading fails with its name.
    readable = [file for file in candidates if extension(file) and (file.is_file() or not file.exists())]
    if not readable:
        raise DataError(f"{key}={path}: holds no text; read are files that end in {allowed}")
    if ignored := sorted(candidates - set(readable)):
        logger.warning("%s=%s: %d other files are not read, such as %s", key, path, len(ignored), ignored[0])
    # A file with several names is read once, if possible under its own name. realpath, because Path.resolve raises for
    # a link to itself, which should fail when it is read.
    links_last = sorted(readable, key=lambda file: (not file.is_symlink(), file))
    by_place = {os.path.realpath(file): file for file in links_last}
    files = sorted(by_place.values())
    if again := sorted(set(readable) - set(files)):
        logger.warning(
            "%s=%s: %d links to files that are read anyway are left out, such as %s", key, path, len(again), again[0]
        )
    return files


def _visible_files(directory: Path) -> Iterator[Path]:
    """The files below a directory, then the files below its links to directories. Each directory is read once."""
    seen: set[Path] = set()
    directories, links = [directory], list[Path]()
    while directories or links:
        here = directories.pop() if directories else links.pop(0)
        if here.resolve() in seen:
            continue
        seen.add(here.resolve())
        try:
            entries = sorted(path for path in here.iterdir() if not path.name.startswith("."))
        except OSError as error:
            raise DataError(f"{here}: cannot be read ({error.strerror})") from None
        for entry in entries:
            if entry.is_dir():
                (links if entry.is_symlink() else directories).append(entry)
            else:
                yield entry


def list_library() -> list[Path]:
    """The .py files of the running Python's standard library, without tests. One file has the topics of `help()`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for directory, subdirectories, names in os.walk(library):
        subdirectories[:] = [name for name in subdirectories if name not in NOT_LIBRARY]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"data=embedded: this Python keeps no .py files in {library}; use another one, or data=local data.path=PATH"
        )
    return sorted(files)


def read_library_file(path: Path) -> Iterator[str]:
    """A module is one document, and so is each topic of `help()`."""
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


def shards_of(source: Source, hashes: FileHashes) -> tuple[Shard, ...]:
    """The text in shards for streaming. Each local file is a shard, but small files of one document share a shard.

    A local shard's identity is a hash of its files' kinds and sha256 and of the source's settings. Raises DataError if
    a file cannot be read.
    """
    if source.shards:
        return source.shards
    identities = {file: [extension(file), hashes.sha256(file)] for file in source.files}
    groups: list[list[Path]] = [[]]
    size = 0
    for file in source.files:
        if groups[-1] and (size >= DOCUMENTS_SHARD or not _is_a_document(file) or not _is_a_document(groups[-1][-1])):
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.stat().st_size
    root = Path(os.path.commonpath([file.parent for file in source.files]))
    shards = []
    for group in groups:
        name = str(group[0].relative_to(root)) + (f" to {group[-1].relative_to(root)}" if len(group) > 1 else "")
        identity = canonical_hash([source.settings, [identities[file] for file in group]])
        n_bytes = sum(text_size(file, file.stat().st_size) for file in group)
        checksums = tuple(identities[file][1] for file in group)
        shards.append(Shard(name, identity, tuple(map(str, group)), size=n_bytes, checksums=checksums))
    return tuple(shards)


def _is_a_document(file: Path) -> bool:
    return not extension(file).startswith((".jsonl", ".parquet"))


def units_of(source: Source, hashes: FileHashes) -> Sequence[Shard]:
    """The text in units for `prepare`, in order, validation files last. A unit is what one process reads at a time:
    a part of a large jsonl or parquet file, or several small files. Units decide nothing that is written.

    Raises DataError where a file cannot be read.
    """
    if source.shards:
        return source.shards
    return _units(source.files, hashes, False) + _units(source.val_files, hashes, True)


def _units(files: Sequence[Path], hashes: FileHashes, held_out: bool) -> list[Shard]:
    sha256 = functools.cache(hashes.sha256)
    cuts: list[tuple[list[Path], tuple[int, int] | None, int]] = []  # files, part, bytes of text
    for file in files:
        n_bytes = text_size(file, file.stat().st_size)
        last, part, size = cuts[-1] if cuts else ([], None, UNIT_BYTES + 1)
        if n_bytes > UNIT_BYTES and (parts := _parts(file)):
            cuts += [([file], part, part_size) for part, part_size in parts]
        elif part is None and size + n_bytes <= UNIT_BYTES:
            cuts[-1] = ([*last, file], None, size + n_bytes)
        else:
            cuts.append(([file], None, n_bytes))
    units = []
    for paths, part, size in cuts:
        content: list[Any] = [[extension(file), sha256(file)] for file in paths]
        content = content if part is None else [*content[0], part]
        identity = canonical_hash(["held out", content] if held_out else content)
        units.append(Shard(str(paths[0]), identity, tuple(map(str, paths)), part, held_out, size))
    return units


def _parts(file: Path) -> list[tuple[tuple[int, int], int]]:
    """Each part of a file (`Shard.part`) with its size. Empty if the file is read as a whole."""
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
        return []  # the reader will name the fault
    parts = []
    start = size = 0
    for group in range(footer.num_row_groups):
        columns = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
        size += round(sum(column.total_compressed_size for column in columns) / COMPRESSED)
        if size >= UNIT_BYTES or group + 1 == footer.num_row_groups:
            parts.append(((start, group + 1), size))
            start, size = group + 1, 0
    return parts
