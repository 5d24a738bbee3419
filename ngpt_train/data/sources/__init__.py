"""Sources of documents: files of this machine, and the hub. `open_source` opens them."""

from __future__ import annotations

import platform
from functools import partial

from ngpt_train.config.schema import DataConfig
from ngpt_train.core.errors import DataError
from ngpt_train.data.sources.hub import list_hub
from ngpt_train.data.sources.local_files import LocalText, list_files, list_library, read_library_file
from ngpt_train.data.sources.readers import read_file
from ngpt_train.data.sources.source import Source


def open_source(data: DataConfig) -> Source:
    """The source of `data`. Lists files or shards and reads none. Raises ConfigError (data.repo) and DataError."""
    if data.kind == "embedded":
        settings = {"python": platform.python_version()}
        return Source("embedded", LocalText(read_library_file), settings, list_library())
    if data.on_hub:
        return list_hub(data)
    assert data.path is not None
    reader = LocalText(partial(read_file, text_field=data.read_field))
    held_out = [] if data.val_files is None else list_files(data.val_files, "data.val_files")
    files = [file for file in list_files(data.path) if file not in held_out]
    if not files:
        raise DataError(
            f"data.val_files={data.val_files}: all files of data.path={data.path}; none is left to train on"
        )
    return Source("local", reader, {"text_field": data.read_field}, files, val_files=held_out)
