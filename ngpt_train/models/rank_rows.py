"""This rank's rows of a tensor that FSDP2 may have sharded. FSDP2 shards by whole rows."""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: object) -> "TypeIs[DTensor]":
    """Whether `tensor` is a DTensor. FSDP2 imports their module, which takes half as long as torch, and few need it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(matrix: Tensor) -> Tensor:
    """This rank's rows of `matrix` `(rows, d)`; there may be none."""
    return matrix.to_local() if is_sharded(matrix) else matrix


def first_row(tensor: Tensor) -> int:
    """The number of this rank's first row in the whole tensor. Only FSDP2's last shards have fewer rows."""
    if not is_sharded(tensor):
        return 0
    mesh = tensor.device_mesh
    shard = mesh.ndim - 1
    return min(mesh.get_local_rank(shard) * -(-len(tensor) // mesh.size(shard)), len(tensor))


def shard_number(tensor: Tensor) -> int:
    """The number of this rank's shard, from 0; 0 for a tensor that is not sharded."""
    return tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1) if is_sharded(tensor) else 0


def replicas(tensor: Tensor) -> int:
    """The number of ranks with the same rows of a sharded tensor; 1 for a tensor that is not sharded."""
    if not is_sharded(tensor):
        return 1
    mesh = tensor.device_mesh
    return mesh.size() // mesh.size(mesh.ndim - 1)
