"""Writes and reads the tensor files of a checkpoint.

A piece is one rank's rows of a tensor, with its place in the tensor. A safetensors file has the pieces of a rank: the
length of a header, the header in JSON, and the bytes of one tensor after the other. Bytes are summed while they are
written, so that nothing is read again for a checksum; safetensors' own functions put a file together in memory, and
leave its checksum to a second pass. torch.distributed.checkpoint (DCP) reads the files.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ngpt_train.core.errors import DataError, in_one_line
from ngpt_train.training.checkpoint.catalogue import CHUNK, new_checksum

Place = tuple[str, tuple[int, ...]]  # a tensor's name, and where in the tensor a piece begins
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
# Where each piece lies in its tensor, by the names that torch.distributed.checkpoint reads.
PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
MOST_THREADS = 8  # that read files


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of the tensor `name`, from `offsets` on."""

    name: str
    offsets: tuple[int, ...]
    rows: Tensor

    @property
    def place(self) -> Place:
        return self.name, self.offsets


def pieces_of(name: str, tensor: Tensor) -> Iterator[Piece]:
    """The pieces of a tensor on this rank: the whole tensor, or the rank's rows of a sharded one. Nothing is copied."""
    if not hasattr(tensor, "__create_chunk_list__"):
        yield Piece(name, (0,) * tensor.ndim, tensor.detach())
        return
    for chunk in tensor.__create_chunk_list__():
        if chunk.sizes.numel():
            rows = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))  # type: ignore[attr-defined]
            yield Piece(name, tuple(chunk.offsets), rows.detach())


def write_tensors(path: Path, pieces: Sequence[Piece], kind: str) -> dict[str, Any]:
    """Writes `pieces`, each of another tensor, to a new file and syncs it; returns its entry in the manifest.

    kind: a value of checkpoint.checksum. Raises OSError.
    """
    # Large elements first, so that all tensors are aligned.
    ordered = sorted(pieces, key=lambda piece: (-piece.rows.element_size(), piece.name))
    checksum, size = new_checksum(kind), 0
    with path.open("xb", buffering=0) as file:
        for part in chain([_header(ordered)], (_bytes(piece.rows) for piece in ordered)):
            for begin in range(0, len(part), CHUNK):
                chunk = part[begin : begin + CHUNK]
                checksum.update(chunk)
                size += len(chunk)
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"bytes": size, kind: checksum.hexdigest()}


def _header(pieces: Sequence[Piece]) -> memoryview:
    places = {piece.name: {OFFSETS: list(piece.offsets)} for piece in pieces}
    assert len(places) == len(pieces), "two pieces of a tensor"
    header: dict[str, Any] = {"__metadata__": {"DCP_VERSION": "1.0", PLACES: json.dumps(places), "format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.rows.nbytes
        header[piece.name] = {
            "dtype": _DTYPES[piece.rows.dtype],
            "shape": list(piece.rows.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in order; a copy if it is not in the host's memory."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
