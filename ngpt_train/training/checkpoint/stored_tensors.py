"""Reads the tensors of a checkpoint with torch.distributed.checkpoint (DCP).

Format 2 has safetensors files. Format 1 has DCP's own files, and their index, `.metadata`, is a pickle. A pickle may
call any function, and DCP's reader lets it. So `.metadata` is first read here, by an unpickler that makes the classes
of DCP and no others.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ngpt_train.core.errors import DataError
from ngpt_train.training.checkpoint.integrity import Manifest
from ngpt_train.training.checkpoint.tensor_files import in_one_line

METADATA = ".metadata"
MOST_THREADS = 8  # that read files
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
    """The place of each tensor in the files of a checkpoint. files: the names in its manifest.

    Raises DataError for a pickle with anything else in it, and for tensors in files outside the manifest.
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
    except Exception as error:  # a damaged pickle may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{checkpoint / METADATA} is not what torch writes ({problem}); do not use it") from None
    if elsewhere or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"{checkpoint / METADATA} has tensors in files that the manifest does not name, such as "
            f"{next(iter(elsewhere), '?')}; do not use it"
        )
    return metadata


class StoredTensors:
    """The tensors of a checkpoint, in safetensors files or, in format 1, in torch's own. torch reads both."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        """Reads the place of each tensor. Raises DataError for a file that is damaged."""
        self.checkpoint = checkpoint
        if manifest.format == 1:
            self._reader = dcp.FileSystemReader(checkpoint)
            metadata = read_metadata(checkpoint, set(manifest.files))
        else:
            self._reader = HuggingFaceStorageReader(str(checkpoint), thread_count=MOST_THREADS)
            try:
                metadata = self._reader.read_metadata()
            except Exception as error:  # from safetensors, or for a header without places
                problem = f"{_unreadable(checkpoint)}{in_one_line(error)}"
                raise DataError(f"The checkpoint {checkpoint} cannot be read: {problem}") from None
        found = metadata.state_dict_metadata.items()
        self._stored = {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}
        self.names = self._stored.keys()

    def sizes(self) -> list[int]:
        """The number of elements of each tensor."""
        return [entry.size.numel() for entry in self._stored.values()]

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies stored values into `tensors`, by name; a tensor may be sharded.

        Raises DataError if a tensor has another shape, or if the files lack a part of it.
        """
        for name, tensor in tensors.items():
            stored = self._stored[name]
            if stored.size != tensor.shape:
                raise DataError(
                    f"The checkpoint {self.checkpoint} cannot be read: {name} has the shape {list(stored.size)} there, "
                    f"and {list(tensor.shape)} in the model."
                )
            places = {tuple(chunk.offsets) for chunk in stored.chunks}
            there = sum(chunk.sizes.numel() for chunk in stored.chunks)
            if there != stored.size.numel() or len(places) != len(stored.chunks):
                raise DataError(f"The checkpoint {self.checkpoint} lacks a part of {name}, or has one twice.")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(dict(tensors), storage_reader=self._reader, no_dist=True)
        except (RuntimeError, ValueError, CheckpointException) as error:
            failures = error.failures if isinstance(error, CheckpointException) else {}
            first = next(iter(failures.values()))[0] if failures else error
            raise DataError(f"The checkpoint {self.checkpoint} cannot be read: {in_one_line(first)}") from None


def _unreadable(checkpoint: Path) -> str:
    """`NAME: ` of the first file whose header safetensors cannot read; empty if there is none."""
    from safetensors import safe_open

    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                continue
        except Exception:  # the one that torch's reader met
            return f"{path.name}: "
    return ""
