"""Work on whole matrices, shared out among ranks: each rank has some of them whole, and the results return."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# Gloo has no all-to-all; torch warns on every rank that it gathers all instead.
logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)


class SharedOut:
    """n matrices of one shape, `(rows, d)`, shared out in order: each rank has as many as the first, or what is left.

    like: one of the matrices. If FSDP2 has sharded it, each rank has its rows of all n, and all ranks of its mesh take
    part, HSDP's replicas too. Otherwise each rank of `mesh` has all n whole; without a mesh there is one rank.

    The methods are collective if there are several ranks.
    """

    def __init__(self, n: int, like: Tensor, mesh: DeviceMesh | None) -> None:
        self.n, self.shape = n, like.shape
        self.mesh = like.device_mesh if isinstance(like, DTensor) else mesh
        placements = like.placements if isinstance(like, DTensor) else (Replicate(),)
        self._by_rows = [Shard(1) if placement.is_shard() else Replicate() for placement in placements]
        self._by_matrix = [Shard(0) for _ in placements]
        self._everywhere = [Replicate() for _ in placements]

    def to_owners(self, rows: Tensor) -> Tensor:
        """This rank's rows of all matrices, `(n, its rows, d)` -> its matrices, `(its number, rows, d)`."""
        return self._moved(rows, self.shape, self._by_rows, self._by_matrix)

    def to_rows(self, matrices: Tensor) -> Tensor:
        """The way back."""
        return self._moved(matrices, self.shape, self._by_matrix, self._by_rows)

    def own(self, of_all: Tensor) -> Tensor:
        """What belongs to this rank's matrices, of a tensor that every rank has for all n, `(n, ...)`."""
        return self._moved(of_all, of_all.shape[1:], self._everywhere, self._by_matrix)

    def of_all(self, own: Tensor) -> Tensor:
        """The way back, on every rank."""
        return self._moved(own, own.shape[1:], self._by_matrix, self._everywhere)

    def _moved(self, x: Tensor, shape: Sequence[int], old: Sequence[Placement], new: Sequence[Placement]) -> Tensor:
        if self.mesh is None:
            return x
        whole = torch.empty(self.n, *shape, device="meta")
        placed = DTensor.from_local(x, self.mesh, old, shape=whole.shape, stride=whole.stride())
        return placed.redistribute(placements=new).to_local()
