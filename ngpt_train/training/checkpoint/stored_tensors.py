"""Reads the tensor files of a checkpoint (tensor_files.py) with torch.distributed.checkpoint (DCP)."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ngpt_train.core.errors import DataError, in_one_line

MOST_THREADS = 8  # that read files


class StoredTensors:
    """The tensors of a checkpoint, read by torch."""

    def __init__(self, checkpoint: Path) -> None:
        """Reads the place of each tensor. Raises DataError for a file that is damaged."""
        self.checkpoint = checkpoint
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
        """Copies stored values into `tensors`, by name; a tensor may be sharded. Raises DataError if a tensor has
        another shape, or if the files lack a part of it."""
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
