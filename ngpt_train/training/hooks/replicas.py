"""Compares the tensors that several ranks hold: all weights, moments and moving averages under DDP, those of vectors
under FSDP2, and under HSDP also each shard across the groups.

Replicas are computed from the same numbers, so they are equal to the bit. If they differ, a memory or a device has
failed, and the ranks train different models whose gradients are averaged.
"""

import torch
from torch import Tensor

from ngpt_train.models.rank_rows import is_sharded, local_rows, replicas, shard_number
from ngpt_train.training.checkpoint.state_tensors import with_names
from ngpt_train.training.loop import Hook, TrainingRun, due
from ngpt_train.training.state import TrainState

PART = 1 << 20
_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # _INTEGERS[bytes of an element]


class Replicas(Hook):
    """Compares before each checkpoint, and every parallel.check_replicas steps."""

    def check(self, run: TrainingRun) -> None:
        if run.saving or due(run.step, run.state.config.parallel.check_replicas):
            check_replicas(run.state)


class ReplicaError(RuntimeError):
    """Ranks hold different weights. A new start from the last checkpoint makes them equal."""

    exit_code = 1


def check_replicas(state: TrainState) -> None:
    """Raises ReplicaError, on every rank, if a replica differs in a bit. A collective call, which waits for the device;
    one rank has nothing to compare."""
    if state.world.size == 1:
        return
    buffers = dict(state.model.named_buffers())  # ranks may count in them what each has seen
    names, owners, sums = [], [], []
    for name, tensor in with_names(state):
        if name not in buffers and (not is_sharded(tensor) or replicas(tensor) > 1):
            names.append(name)
            owners.append(shard_number(tensor))  # 0 for a whole tensor
            sums.append(checksum(tensor))
    ranks = state.world.gather((owners, torch.stack(sums).tolist() if sums else []))
    first: dict[tuple[int, int], tuple[int, int]] = {}  # the first rank that holds a shard of a tensor, and its sum
    for rank, (shards, of_rank) in enumerate(ranks):
        for index, (name, shard, own) in enumerate(zip(names, shards, of_rank, strict=True)):
            other, of_other = first.setdefault((index, shard), (rank, own))
            if own != of_other:
                raise ReplicaError(
                    f"step {state.step}: {name} differs between ranks {other} and {rank}, so the memory or the "
                    "device of one has failed. Nothing is saved; the same command goes on from the last checkpoint"
                )


def checksum(tensor: Tensor) -> Tensor:
    """A sum modulo 2^64 over this rank's elements: the bits of each, as an integer, times an odd factor of its place.
    0-dim int64, without rounding, on the tensor's device, with memory for PART elements. One changed element changes
    it, and so do two exchanged ones."""
    bits = local_rows(tensor).detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    factors = torch.arange(1, min(PART, len(bits)) + 1, device=bits.device) * _ODD
    factors = (factors ^ (factors >> 32)) | 1  # no longer evenly spaced, so that two exchanges do not cancel
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(PART):
        total = total * _ODD + (part * factors[: len(part)]).sum()
    return total
