"""Reads the safetensors files of a checkpoint into tensors, whichever ranks wrote and whichever read them.

Each file is mapped, and what a rank needs of it is copied once, into the tensors of the state. Executes nothing.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ngpt_train.core.errors import DataError
from ngpt_train.training.checkpoint.pieces import pieces_of
from ngpt_train.training.checkpoint.writing import OFFSETS, PLACES

MOST_THREADS = 8


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
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
                raise DataError(f"The checkpoint {checkpoint} cannot be read: {path.name}: {problem}") from None
        self.names = self._pieces.keys()

    def sizes(self) -> list[int]:
        """Of each tensor, how many numbers it has."""
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
