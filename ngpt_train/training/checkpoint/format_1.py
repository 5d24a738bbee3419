"""The tensors of checkpoints of format 1, in the files of torch.distributed.checkpoint (DCP).

Their index, `.metadata`, is a pickle. A pickle may call any function, and DCP's own reader lets it. Here only the
classes that DCP writes may be made, so that `.metadata` is known to be harmless before DCP reads it again.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ngpt_train.core.errors import DataError
from ngpt_train.training.checkpoint.tensor_files import in_one_line

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


class DcpTensors:
    """The tensors of a checkpoint; the methods are StoredTensors'."""

    def __init__(self, checkpoint: Path, files: set[str]) -> None:
        """files: the manifest's. Raises DataError."""
        self.checkpoint = checkpoint
        self._stored = read_metadata(checkpoint, files).state_dict_metadata
        self.names = self._stored.keys()

    def sizes(self) -> list[int]:
        return [entry.size.numel() for entry in self._stored.values() if isinstance(entry, TensorStorageMetadata)]

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """A collective call."""
        reader, alone = dcp.FileSystemReader(self.checkpoint), not dist.is_initialized()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(dict(tensors), storage_reader=reader, no_dist=alone)
        except (RuntimeError, ValueError, CheckpointException) as error:
            failures = error.failures if isinstance(error, CheckpointException) else {}
            first = next(iter(failures.values()))[0] if failures else error  # of the first rank that failed
            raise DataError(f"The checkpoint {self.checkpoint} cannot be read: {in_one_line(first)}") from None
