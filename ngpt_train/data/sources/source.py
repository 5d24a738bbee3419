"""Where documents come from: an ordered list of shards and a way to read one.

A source can be read again and again, always in the same order; nothing here holds more than a batch of
documents in memory.
"""

from __future__ import annotations

import glob
import logging
import os
import platform
import sysconfig
import tempfile
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.prepared.units import FilePart, Hash, Unit, cut_files
from ngpt_train.data.sources.datasets_library import DatasetsText
from ngpt_train.data.sources.hub import NoPlainFiles, list_hub
from ngpt_train.data.sources.readers import EXTENSIONS, extension, read_file
from ngpt_train.data.streamed.shard_cache import Shard, ShardSource

logger = logging.getLogger(__name__)

NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class LocalText:
    """Reads files, or parts of them. Travels to worker processes."""

    read: Callable[..., Iterator[str]]

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The documents of a shard's files, in order. Raises DataError where they are faulty."""
        if isinstance(shard, FilePart):
            yield from self.read(Path(shard.files[0]), part=shard.part)
            return
        for file in shard.files:
            yield from self.read(Path(file))


@dataclass(frozen=True)
class Source:
    """Text in a fixed order: files of this machine, or shards from elsewhere whose identity is known.

    settings: what, besides their content, decides the documents; revision: the commit on the hub.
    """

    kind: str
    reader: ShardSource
    settings: dict[str, str]
    files: list[Path] = field(default_factory=list)
    shards: tuple[Shard, ...] = ()
    revision: str | None = None

    @property
    def names(self) -> list[str]:
        return [str(file) for file in self.files] or [shard.name for shard in self.shards]

    @property
    def is_one_document(self) -> bool:
        """Whether that is known without reading."""
        return len(self.files) == 1 and extension(self.files[0]).startswith(".txt")

    def content(self, sha256: Hash) -> list[list[str]]:
        """What identifies the text: of local files their bytes, wherever they lie. Raises what `sha256` raises."""
        if self.files:
            return [[extension(file), sha256(file)] for file in self.files]
        return [[shard.identity] for shard in self.shards]

    def units(self, sha256: Hash) -> list[Unit]:
        """The text in units, in order. Raises what `sha256` raises."""
        return cut_files(self.files, sha256) if self.files else [Unit(shard, 1) for shard in self.shards]

    def documents(self) -> Iterator[str]:
        """All documents. Raises DataError where one cannot be read."""
        for shard in self.shards or [Shard(str(file), "", (str(file),)) for file in self.files]:
            with tempfile.TemporaryDirectory() as scratch:
                yield from self.reader.documents(shard, Path(scratch))


def open_source(data: DataConfig) -> Source:
    """The text that `data` names. Lists files or shards, reads none. Raises ConfigError and DataError."""
    if data.kind == "embedded":
        return _embedded()
    if data.on_hub:
        return _hub(data)
    if data.path is None:
        raise ConfigError("data.path=null: data=local needs the file, directory or glob of the text, as data.path=PATH")
    reader = LocalText(partial(read_file, text_field=data.text_field))
    return Source("local", reader, {"text_field": data.text_field}, list_files(data.path))


def _hub(data: DataConfig) -> Source:
    """Plain parquet or jsonl files are fetched as they are; the datasets library reads everything else."""
    settings = {"repo": str(data.repo), "split": data.split, "text_field": data.text_field}
    try:
        listing = list_hub(data)
    except NoPlainFiles as error:
        if data.streamed:
            raise
        reader = DatasetsText(str(data.repo), error.commit, data.split, data.text_field)
        return Source(data.kind, reader, settings, shards=(reader.shard,), revision=error.commit)
    return Source(data.kind, listing.source, settings, shards=listing.shards, revision=listing.commit)


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
    # A link to nothing is listed, so that it is missed.
    readable = [file for file in candidates if extension(file) and (file.is_file() or not file.exists())]
    if not readable:
        raise DataError(f"data.path={path}: holds no text; read are files that end in {allowed}")
    if ignored := sorted(candidates - set(readable)):
        logger.warning("data.path=%s: %d other files are not read, such as %s", path, len(ignored), ignored[0])
    # What is there under several names is read once, under its own if that is among them.
    by_place = {file.resolve(): file for file in sorted(readable, key=lambda file: (not file.is_symlink(), file))}
    files = sorted(by_place.values())
    if again := sorted(set(readable) - set(files)):
        logger.warning(
            "data.path=%s: %d links to files that are read anyway are left out, such as %s", path, len(again), again[0]
        )
    return files


def _visible_files(directory: Path) -> Iterator[Path]:
    """Of a directory and those in it; then of those that it has links to, each once."""
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
    return Source("embedded", LocalText(_read_library_file), {"python": platform.python_version()}, sorted(files))


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
