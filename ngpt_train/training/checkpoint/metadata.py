"""Reads the `.metadata` of torch.distributed.checkpoint, which is a pickle, without running what it says.

A pickle may call any function. DCP's own reader lets it. Here only the classes that DCP writes may be made, so that
`.metadata` is known to be harmless before DCP reads it again.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ngpt_train.core.errors import DataError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_metadata(checkpoint: Path, files: set[str]) -> Metadata:
    """The place of each tensor in the files of a checkpoint, of which the manifest names `files`.

    Raises DataError for a pickle that would do anything else, and for tensors in files that the manifest does not name.
    """
    try:
        with (checkpoint / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
        elsewhere = {str(place.relative_path) for place in metadata.storage_data.values()} - files
        names = set(metadata.state_dict_metadata)
    except (OSError, RecursionError, MemoryError) as error:
        raise DataError(f"{checkpoint / METADATA} cannot be read: {error}") from None
    except Exception as error:  # what a damaged pickle raises may be anything
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{checkpoint / METADATA} is not what torch writes ({problem}); do not use it") from None
    if elsewhere or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{checkpoint / METADATA} has tensors in files that the manifest does not name, such as "
            f"{next(iter(elsewhere), '?')}; do not use it"
        )
    return metadata
