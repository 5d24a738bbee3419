"""A rank's rows of a sharded tensor.

FSDP2 shards rows over all ranks. With hybrid sharding (HSDP) it shards them over the ranks of a group, and each group
holds the whole tensor once.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def held(tensor: Tensor) -> Tensor:
    """This rank's rows of `tensor`, without gradients. There may be none."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def replicas(tensor: Tensor) -> int:
    """The number of ranks with the same rows of a sharded tensor; 1 for a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return mesh.size() // mesh.size(mesh.ndim - 1)


def shard_number(tensor: Tensor) -> int:
    """The number of this rank's shard, from 0; 0 for a tensor that is not sharded."""
    return tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 0


def first_row(tensor: Tensor) -> int:
    """The number of this rank's first row in the whole tensor. Only FSDP2's last shards have fewer rows."""
    if not isinstance(tensor, DTensor):
        return 0
    n_shards = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    return min(shard_number(tensor) * -(-len(tensor) // n_shards), len(tensor))


def checksum(tensor: Tensor) -> Tensor:
    """A sum modulo 2^64 over this rank's elements: the bits of each, as an integer, times an odd factor of its place.

    0-dim int64, without rounding. So one changed element changes it, and so do two exchanged elements. Computed on the
    tensor's device, with memory for PART elements.
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
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # _INTEGERS[bytes of an element]
