"""The micro batches of a step: the number of their rows, and their way to the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ngpt_train.config.keys import AUTO
from ngpt_train.config.validate import report_together
from ngpt_train.core.errors import DataError

if TYPE_CHECKING:  # a step needs torch alone; reading data needs numpy
    from ngpt_train.config.schema import Config
    from ngpt_train.data.loader import Position, TrainLoader
    from ngpt_train.data.rows import Batch
    from ngpt_train.models.decoder import Decoder


# The most tokens of a forward pass with micro_rows=auto: they keep a GPU busy at every scale here, and a model of 1B
# parameters fits in 80 GB with them.
AUTO_MICRO_TOKENS = 16_384


def resolve_micro_rows(config: Config, world_size: int) -> int:
    """`train.micro_rows` with auto resolved: the number of rows in one forward pass of one rank. Raises ConfigError if
    batch_rows is not a whole number of micro batches on every rank."""
    for conflict in config.train.batch_conflicts(world_size):
        raise report_together(config, conflict, origins={})
    if config.train.micro_rows != AUTO:
        return int(config.train.micro_rows)
    possible = divisors(config.train.rows_per_step // world_size)
    return max([rows for rows in possible if rows * config.model.context <= AUTO_MICRO_TOKENS], default=1)


def divisors(number: int) -> list[int]:
    """The divisors of a number >= 1, from 1 to itself."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


class Feed(Iterator["tuple[list[list[Tensor]], Position]"]):
    """The micro batches of each step, as int64 tensors on `device`, with the position in the data after the step.

    On a GPU a separate CUDA stream copies the batches of the next step while the model works on this step. The position
    of the next step is returned only with its batches, so that a checkpoint holds the position of the consumed rows.
    Raises DataError for documents that are too many or too long for the attention of `model`.
    """

    def __init__(self, loader: TrainLoader, model: Decoder, device: torch.device) -> None:
        self._loader, self._model, self._device = loader, model, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: _Step | None = None

    def __next__(self) -> tuple[list[list[Tensor]], Position]:
        step = self._next or self._fetch()
        self._next = None if self._copies is None else self._fetch()
        if step.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(step.copied)
            for part in chain.from_iterable(step.micro_batches):
                # The part was allocated on the stream of the copies. That stream must not use its memory for the next
                # batch before the model is done with this one.
                part.record_stream(stream)
        return step.micro_batches, step.position

    def _fetch(self) -> _Step:
        arrays, position = next(self._loader)
        # Before the ids leave the host: on the device only an assertion could end the run, without a message.
        self._check(arrays)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            batches = [[to_device(torch.from_numpy(part), self._device) for part in batch] for batch in arrays]
            return _Step(batches, position, None if self._copies is None else self._copies.record_event())

    def _check(self, micro_batches: list[Batch]) -> None:
        for _, _, *doc_ids in micro_batches:
            for ids in doc_ids:
                try:
                    self._model.check_documents(torch.from_numpy(ids), self._device)
                except ValueError as error:
                    raise DataError(str(error)) from None

    def close(self) -> None:
        self._loader.close()


class _Step(NamedTuple):
    micro_batches: list[list[Tensor]]
    position: Position
    copied: torch.cuda.Event | None  # reached when the batches are on the device


def to_device(part: Tensor, device: torch.device) -> Tensor:
    """`part` on `device`. A copy to a GPU is made from pinned memory, so that the host does not wait for it."""
    if device.type == "cuda" and part.device.type == "cpu":
        part = part.pin_memory()
    return part.to(device, non_blocking=True)
