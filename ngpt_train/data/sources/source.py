"""From `config.data` to a text in a fixed order, which can be read again and again."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import ConfigError
from ngpt_train.data.hashes import FileHashes
from ngpt_train.data.sources.hub import DatasetsText, NoPlainFiles, list_hub
from ngpt_train.data.sources.local import LocalText, list_files, list_library, local_shards, read_library_file
from ngpt_train.data.sources.readers import extension, read_file
from ngpt_train.data.sources.text import Shard, ShardSource

Hash = Callable[[Path], str]  # the sha256 of a file


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

    def cut(self, hashes: FileHashes) -> tuple[Shard, ...]:
        """The text in shards, as it is streamed. Raises DataError where a file cannot be read."""
        return self.shards or local_shards(self.files, self.settings, hashes)

    def documents(self) -> Iterator[str]:
        """All documents. Raises DataError where one cannot be read."""
        for shard in self.shards or [Shard(str(file), "", (str(file),)) for file in self.files]:
            yield from self.documents_of(shard)

    def documents_of(self, shard: Shard) -> Iterator[str]:
        """Those of one shard. Raises DataError where one cannot be read."""
        with tempfile.TemporaryDirectory() as scratch:
            yield from self.reader.documents(shard, Path(scratch))


def open_source(data: DataConfig) -> Source:
    """The text that `data` names. Lists files or shards, reads none. Raises ConfigError and DataError."""
    if data.kind == "embedded":
        settings = {"python": platform.python_version()}
        return Source("embedded", LocalText(read_library_file), settings, list_library())
    if data.on_hub:
        return _hub(data)
    if data.path is None:
        raise ConfigError("data.path=null: data=local needs the file, directory or glob of the text, as data.path=PATH")
    reader = LocalText(partial(read_file, text_field=data.text_field))
    return Source("local", reader, {"text_field": data.text_field}, list_files(data.path))


def _hub(data: DataConfig) -> Source:
    settings = {"repo": str(data.repo), "split": data.split, "text_field": data.text_field}
    try:
        listing = list_hub(data)
    except NoPlainFiles as error:
        if data.streamed:
            raise
        reader = DatasetsText(str(data.repo), error.commit, data.split, data.text_field)
        return Source(data.kind, reader, settings, shards=(reader.shard,), revision=error.commit)
    return Source(data.kind, listing.source, settings, shards=listing.shards, revision=listing.commit)
