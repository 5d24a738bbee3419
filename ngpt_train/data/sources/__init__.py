"""Sources of documents: files of this machine, and the hub. `open_source` opens them."""

import json
import platform
from functools import partial
from typing import Any

from ngpt_train.config.schema import DataConfig
from ngpt_train.data.sources.hub import list_hub
from ngpt_train.data.sources.local_files import LocalText, list_library, read_library_file, text_files
from ngpt_train.data.sources.readers import checked_text, read_file
from ngpt_train.data.sources.source import Shard, Source, place_of


def open_source(data: DataConfig) -> Source:
    """The source of `data`. Lists files or shards and reads none. Raises ConfigError (data.repo) and DataError."""
    if data.kind == "embedded":
        settings = {"python": platform.python_version()}
        return Source("embedded", LocalText(read_library_file), settings, list_library())
    if data.on_hub:
        return list_hub(data)
    reader = LocalText(partial(read_file, text_field=data.read_field))
    files, held_out = text_files(data)
    return Source("local", reader, {"text_field": data.read_field}, files, val_files=held_out)


def documents_by_split(data: DataConfig) -> tuple[Source, dict[str, list[list[Any]]]]:
    """The fields of each example, by split, in the order of the files. Raises DataError."""
    source = open_source(data)
    documents: dict[str, list[list[Any]]] = {"train": [], "validation": []}
    held_out = {str(file) for file in source.val_files} | {s.name for s in source.shards if s.held_out}
    for shard in source.shards or [Shard(str(file), "", (str(file),)) for file in [*source.files, *source.val_files]]:
        for number, document in enumerate(source.documents_of(shard), 1):
            fields = json.loads(document)
            if data.translation_field is not None:
                checked_text(fields[-1], partial("{}, pair {}".format, shard.name, number), data.translation_field)
            place = place_of(document.encode())
            validates = shard.name in held_out if held_out else place < data.val_fraction
            if not (validates and held_out and data.val_range) or data.val_range[0] <= place < data.val_range[1]:
                documents["validation" if validates else "train"].append(fields)
    return source, documents
