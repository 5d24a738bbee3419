"""The safetensors files of a checkpoint: pieces of tensors, each with its place in its tensor.

Whichever ranks wrote and whichever read: a piece is what one rank holds of a tensor. Bytes are summed while they are
written, so that nothing is read again for a checksum; safetensors' own functions put a file together in memory, and
leave its checksum to a second pass. The format is small: the length of a header, the header, which is JSON, and the
bytes of tensor after tensor.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from ngpt_train.core.errors import DataError
from ngpt_train.training.checkpoint.integrity import CHUNK, new_checksum

Place = tuple[str, tuple[int, ...]]  # a tensor's name, and where in the tensor a piece begins
MOST_THREADS = 8
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}
# Where each piece lies in its tensor, by the names that torch.distributed.checkpoint reads.
PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of the tensor `name`, which begin at `offsets` of it."""

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

    kind: of checksum. Raises OSError.
    """
    ordered = sorted(pieces, key=lambda piece: (-piece.rows.element_size(), piece.name))  # so that all are aligned
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
    header: dict[str, Any] = {
        "__metadata__": {"DCP_VERSION": "1.0", PLACES: json.dumps(places), "format": "pt"},
    }
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
    """The bytes of a tensor in its order; of one on another device a copy."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class _Stored(NamedTuple):
    """A piece of a tensor in a file: its name there, where in the tensor it begins, its shape."""

    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensors:
    """The tensors of a checkpoint in safetensors files."""

    def __init__(self, checkpoint: Path) -> None:
        """Reads the headers. Raises DataError if a file is not safetensors, or does not say where its pieces lie."""
        self.checkpoint = checkpoint
        self._pieces: dict[str, list[_Stored]] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            try:
                for name, piece in _pieces_in(path):
                    self._pieces.setdefault(name, []).append(piece)
            except Exception as error:  # of safetensors, or of an index that is none
                problem = f"{path.name}: {in_one_line(error)}"
                raise DataError(f"The checkpoint {checkpoint} cannot be read: {problem}") from None
        self.names = self._pieces.keys()

    def sizes(self) -> list[int]:
        """The number of elements of each tensor."""
        return [sum(math.prod(piece.shape) for piece in pieces) for pieces in self._pieces.values()]

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies what is stored into `tensors`, by name, which may be sharded. Raises DataError where the shape of a
        tensor is another one, or a part of it is missing."""
        from safetensors import safe_open

        with ExitStack() as stack, ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            files = {
                path: stack.enter_context(safe_open(path, "pt"))
                for path in {piece.file for pieces in self._pieces.values() for piece in pieces}
            }

            def copy(name: str, target: Tensor, piece: _Stored, here: list[slice], there: list[slice]) -> None:
                target[tuple(here)].copy_(files[piece.file].get_tensor(name)[tuple(there)])

            jobs = []
            for name, tensor in tensors.items():
                self._check_shape(name, tensor)
                for wanted in pieces_of(name, tensor):
                    found = 0
                    for piece in self._pieces[name]:
                        both = [
                            (max(a, b), min(a + n, b + m))
                            for a, n, b, m in zip(
                                *(wanted.offsets, wanted.rows.shape, piece.offsets, piece.shape), strict=True
                            )
                        ]
                        if any(begin >= end for begin, end in both):
                            continue
                        found += math.prod(end - begin for begin, end in both)
                        here = [slice(b - a, e - a) for (b, e), a in zip(both, wanted.offsets, strict=True)]
                        there = [slice(b - a, e - a) for (b, e), a in zip(both, piece.offsets, strict=True)]
                        jobs.append(pool.submit(copy, name, wanted.rows, piece, here, there))
                    if found != wanted.rows.numel():
                        raise DataError(f"The checkpoint {self.checkpoint} lacks a part of {name}.")
            for job in jobs:
                job.result()

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        pieces = self._pieces.get(name)
        if pieces is None:
            raise DataError(f"The checkpoint {self.checkpoint} has no {name}.")
        ends = [[a + n for a, n in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces]
        shape = [max(end) for end in zip(*ends, strict=True)] if len({*map(len, ends)}) == 1 else None
        if shape != list(tensor.shape):
            raise DataError(
                f"The checkpoint {self.checkpoint} cannot be read: {name} has the shape {shape} there, and "
                f"{list(tensor.shape)} in the model."
            )


def _pieces_in(path: Path) -> Iterator[tuple[str, _Stored]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        places = json.loads((file.metadata() or {})[PLACES])
        for name in file.keys():  # noqa: SIM118
            shape, offsets = tuple(file.get_slice(name).get_shape()), tuple(places[name][OFFSETS])
            if len(offsets) != len(shape) or not all(type(n) is int and n >= 0 for n in offsets):
                raise ValueError(f"{name} has no place")
            yield name, _Stored(path, offsets, shape)


def in_one_line(error: BaseException) -> str:
    """The error's type and text in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
