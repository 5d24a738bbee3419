"""Batches on their way to the device, one step ahead of the model on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ngpt_train.core.errors import DataError
from ngpt_train.models.layers.documents import check_room

if TYPE_CHECKING:  # a step needs torch alone; reading data needs numpy
    from ngpt_train.data import Position, TrainLoader
    from ngpt_train.data.rows import Batch


class Feed(Iterator["tuple[list[list[Tensor]], Position]"]):
    """The loader's steps as int64 tensors on `device`, each with the position after it.

    On a GPU the next step's copy is on its way while the model works on this one. Its position is kept back with
    it, so that what is saved is what was consumed.
    """

    def __init__(self, loader: TrainLoader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._next: _Step | None = None

    def __next__(self) -> tuple[list[list[Tensor]], Position]:
        step = self._next or self._fetch()
        self._next = self._fetch() if self._device.type == "cuda" else None
        return step

    def _fetch(self) -> _Step:
        micro_batches, position = next(self._loader)
        if self._device.type == "cuda":
            _check_room(micro_batches)
        return _Step(
            [[to_device(torch.from_numpy(part), self._device) for part in batch] for batch in micro_batches], position
        )

    def close(self) -> None:
        self._loader.close()


def _check_room(micro_batches: list[Batch]) -> None:
    """Here, where it costs no wait: the device could end the run by an assertion only."""
    for _, _, *doc_ids in micro_batches:
        for ids in doc_ids:
            try:
                check_room(torch.from_numpy(ids))
            except ValueError as error:
                raise DataError(str(error)) from None


class _Step(NamedTuple):
    micro_batches: list[list[Tensor]]
    position: Position


def to_device(part: Tensor, device: torch.device) -> Tensor:
    """A copy to a GPU leaves from pinned memory, else the host would wait for it."""
    if device.type == "cuda" and part.device.type == "cpu":
        part = part.pin_memory()
    return part.to(device, non_blocking=True)
