"""Writes the tensor files of a checkpoint.

A piece is one rank's rows of a tensor, with its place in the tensor. A safetensors file has the pieces of a rank: the
length of a header, the header in JSON, and the bytes of one tensor after the other. Bytes are summed while they are
written, so that nothing is read again for a checksum; safetensors' own functions put a file together in memory, and
leave its checksum to a second pass. torch.distributed.checkpoint (DCP) reads the files (stored_tensors.py).
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.training.checkpoint.catalogue import CHUNK, new_checksum

Place = tuple[str, tuple[int, ...]]  # a tensor's name, and where in the tensor a piece begins
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
# Where each piece lies in its tensor, by the names that torch.distributed.checkpoint reads.
PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


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
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for chunk in tensor.__create_chunk_list__():
        if chunk.sizes.numel():
            rows = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))  # type: ignore[attr-defined]
            yield Piece(name, tuple(chunk.offsets), rows.detach())


def write_tensors(path: Path, pieces: Sequence[Piece], kind: str) -> dict[str, Any]:
    """Writes `pieces`, each of another tensor, to a new file and syncs it; returns its entry in the manifest. kind: a
    value of checkpoint.checksum. Raises OSError."""
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
        dtype, shape = _DTYPES[piece.rows.dtype], list(piece.rows.shape)
        header[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in order; a copy if it is not in the host's memory."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
