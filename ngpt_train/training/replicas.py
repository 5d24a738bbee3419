"""Compares what every rank holds whole: all weights and moments under DDP, those of vectors under FSDP2.

All ranks compute them from the same numbers, so they are equal to the bit. Where they are not, a memory or a device has
failed, and the ranks train different models whose gradients are averaged.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.training.state import TrainState

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class ReplicaError(RuntimeError):
    """A rank holds other weights than the others. A new start from the last checkpoint has the same on all."""

    exit_code = 1


def check_replicas(state: TrainState) -> None:
    """Raises ReplicaError, on every rank, if a weight or a moment that every rank holds whole differs in a bit.

    A collective call, which waits for the device; one rank has nothing to compare.
    """
    if state.world.size == 1:
        return
    names, sums = [], []
    with torch.no_grad():
        for name, tensor in _whole(state):
            names.append(name)
            # Of the bits, as whole numbers: a sum without rounding, in which one changed element shows.
            sums.append(tensor.contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
    ranks = state.world.gather(torch.stack(sums).tolist() if sums else [])
    for rank, of_rank in enumerate(ranks):
        for name, own, first in zip(names, of_rank, ranks[0], strict=True):
            if own != first:
                raise ReplicaError(
                    f"step {state.step}: {name} on rank {rank} is not what it is on rank 0, so a memory or a device of "
                    "theirs has failed. Nothing is saved; the same command goes on from the last checkpoint"
                )


def _whole(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    for parameter, name in names.items():
        if not isinstance(parameter, DTensor):
            yield name, parameter
    for parameter, moments in state.optimizer.state.items():
        for moment, value in moments.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                yield f"{moment} of {names[parameter]}", value
