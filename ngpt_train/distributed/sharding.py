"""The rows of a sharded tensor that a rank holds. FSDP2 shards rows: over all ranks, or, with hybrid sharding (HSDP),
over the ranks of a group, where each group holds the whole tensor once."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def held(tensor: Tensor) -> Tensor:
    """The rows of `tensor` that this rank holds, without gradients; there may be none."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def replicas(tensor: Tensor) -> int:
    """How many ranks hold the same rows of a sharded tensor; of a whole one, whose rows all ranks hold, 1."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return mesh.size() // mesh.size(mesh.ndim - 1)


def shard_number(tensor: Tensor) -> int:
    """Which of the shards this rank holds, from 0; 0 for a tensor that is not sharded."""
    return tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 0


def first_row(tensor: Tensor) -> int:
    """The place of this rank's first row in the whole. FSDP2 gives each shard as many rows, but fewer to the last."""
    if not isinstance(tensor, DTensor):
        return 0
    n_shards = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    return min(shard_number(tensor) * -(-len(tensor) // n_shards), len(tensor))


def checksum(tensor: Tensor) -> Tensor:
    """The bits of each element of what this rank holds, as a whole number, times an odd factor of its place, summed
    modulo 2^64; 0-dim int64. Without rounding: one element that has changed shows, and so do two that have changed
    places.

    On the tensor's device, with memory for PART elements.
    """
    bits = held(tensor).contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    factors = torch.arange(1, min(PART, len(bits)) + 1, device=bits.device) * _ODD
    factors = (factors ^ (factors >> 32)) | 1  # no longer evenly spaced, so that two exchanges do not cancel
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(PART):
        total = total * _ODD + (part * factors[: len(part)]).sum()
    return total


PART = 1 << 20
_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
