"""Matrix optimizers of the blocks' matrices, with torch's fused Adam for all other parameters, in one object.

Several ranks share out the work on whole matrices: each has some of them whole, and the results return.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ngpt_train.models.layers.linear import OutputLinear
from ngpt_train.models.rank_rows import first_row, local_rows
from ngpt_train.models.weights import named_weights
from ngpt_train.optim import matrix_steps
from ngpt_train.optim.fused_adam import FusedAdam

if TYPE_CHECKING:
    from ngpt_train.config.sections.optim import OptimConfig
    from ngpt_train.models.decoder import Decoder

# Gloo has no all-to-all; torch warns on every rank that it gathers all instead.
logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)

# Values of the matrices that are orthogonalised at once on all ranks, by kind of device; otherwise one matrix a rank,
# which stays in a CPU's cache. On a GPU a launch costs more than memory: four copies of the values in fp32, 1 GB.
AT_ONCE = {"cuda": 2**26}


@dataclass(frozen=True)
class Stored:
    """A stored matrix `(rows, d_model)`: the rows of the matrices in it, one below the other."""

    rows: tuple[int, ...]
    transposed: bool  # each is stored as (in, out), as W_o and W_down are

    def sizes(self, d_model: int) -> Iterator[tuple[int, int]]:
        """out and in of each matrix."""
        return ((d_model, n) if self.transposed else (n, d_model) for n in self.rows)


def block_matrices(model: Decoder) -> dict[Tensor, Stored]:
    """The matrices that take a matrix step: all but the tables, which are parameters of the model itself."""
    transposed = {linear.matrix for linear in model.modules() if isinstance(linear, OutputLinear)}
    tables = set(model.parameters(recurse=False))
    return {
        parameter: Stored(tuple(parts.values()), parameter in transposed)
        for parameter, parts in named_weights(model)
        if parameter.ndim == 2 and parameter not in tables
    }


class MatrixOptimizer(FusedAdam):
    """The steps of matrix_steps.py for `matrices`, AdamW's for all other parameters of the groups.

    A stored matrix is taken apart: W_q, W_k and W_v have a step each. dtype: of Newton-Schulz, which is of the stored
    matrices of one shape at once, those of all layers. Several ranks share them out: FSDP2's, and those of `mesh`,
    which have all weights whole, as under DDP. Hyperball adds up lengths over FSDP2's shards in one all-reduce.

    State has Adam's keys, and for Muon `step`, `momentum_buffer` and NorMuon's `mean_square`, whole on every rank:
    `(rows, 1)`, or `(1, d_model)` of a transposed matrix.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: Mapping[Tensor, Stored],
        config: OptimConfig,
        dtype: torch.dtype,
        mesh: DeviceMesh | None = None,
    ) -> None:
        beta1, beta2 = config.betas
        super().__init__(groups, lr=0.0, betas=(beta1, beta2), eps=config.eps, decoupled_weight_decay=True)
        assert config.matrix_step is not None
        self.direction, self.keeps_norm = config.matrix_step
        # Null where they have no part in the step.
        self.momentum, self.nesterov = config.momentum or 0.0, config.nesterov
        self.adjust_lr = config.adjust_lr or "original"
        self.matrices, self.dtype, self.mesh = dict(matrices), dtype, mesh

    def moved_by_torch(self, parameter: Tensor) -> bool:
        return parameter not in self.matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient, and their moments. Takes no closure."""
        assert closure is None
        found = [(group, x) for group in self.param_groups for x in group["params"] if x in self.matrices]
        moving = {weight: group for group, weight in found if weight.grad is not None}
        for weight in moving:
            steps = self._state_of(weight)["step"]
            self._keep(steps, steps + 1)
        if self.direction == "adam":
            directions = {weight: self._adam(weight, group) for weight, group in moving.items()}
        else:
            directions = {}
            for weights in self._of_one_shape(moving):
                directions |= dict(zip(weights, self._muon(weights), strict=True))
        if self.keeps_norm:
            products = torch.cat([self._products(*each) for each in directions.items()])
            products = over_shards(products, next(iter(moving)))
            n_each = [len(self.matrices[weight].rows) for weight in directions]
            for (weight, u), of_weight in zip(directions.items(), products.split(n_each), strict=True):
                factors = matrix_steps.ball_factors(of_weight, moving[weight]["lr"])
                self._move(weight, u, factors.to(weight.dtype).unbind())
        else:
            for weight, u in directions.items():
                lr, sizes = moving[weight]["lr"], self.matrices[weight].sizes(weight.shape[1])
                keep = 1 - lr * moving[weight]["weight_decay"]
                self._move(weight, u, [(keep, lr * matrix_steps.adjustment(self.adjust_lr, *size)) for size in sizes])
        super().step()

    def _of_one_shape(self, weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """The stored matrices of each shape, as many as are to be orthogonalised at once."""
        alike: dict[Any, list[Tensor]] = {}
        for weight in weights:
            alike.setdefault((self.matrices[weight], weight.shape, weight.dtype), []).append(weight)
        for (_, shape, _), same in alike.items():
            mesh = same[0].device_mesh if isinstance(same[0], DTensor) else self.mesh
            n_ranks = 1 if mesh is None else mesh.size()
            n = n_ranks * max(1, AT_ONCE.get(same[0].device.type, 0) // (n_ranks * shape.numel()))
            yield from (same[i : i + n] for i in range(0, len(same), n))

    def _gradient(self, weight: Tensor) -> Tensor:
        """This rank's rows, clipped."""
        assert weight.grad is not None
        g = local_rows(weight.grad).to(weight.dtype)
        return g if self.grad_scale is None else g / self.grad_scale

    def _adam(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        """u for this rank's rows of a stored matrix. Moves its state."""
        state, (beta1, beta2), g = self._state_of(weight), group["betas"], self._gradient(weight)
        m = torch.lerp(local_rows(state["exp_avg"]), g, 1 - beta1)
        v = torch.lerp(local_rows(state["exp_avg_sq"]), g.square(), 1 - beta2)
        self._keep(state["exp_avg"], m)
        self._keep(state["exp_avg_sq"], v)
        return matrix_steps.adam_direction(m, v, state["step"], beta1, beta2, group["eps"])

    def _muon(self, weights: Sequence[Tensor]) -> Iterable[Tensor]:
        """u for this rank's rows of stored matrices of one shape. Moves their state."""
        stored, states = self.matrices[weights[0]], [self._state_of(weight) for weight in weights]
        g = torch.stack([self._gradient(weight) for weight in weights])  # (k, its rows, d_model)
        buffers = [local_rows(state["momentum_buffer"]) for state in states]
        buffer = torch.lerp(torch.stack(buffers), g, 1 - self.momentum)
        for old, new in zip(buffers, buffer, strict=True):
            self._keep(old, new)
        u = torch.lerp(g, buffer, self.momentum) if self.nesterov else buffer
        shared = SharedOut(len(weights), weights[0], self.mesh)
        whole = shared.to_owners(u.to(self.dtype))  # (some of k, rows, d_model)
        parts = [matrix_steps.orthogonalised(part) for part in whole.split(stored.rows, dim=1)]
        if self.direction == "normuon":
            inputs = 1 if stored.transposed else 2
            old = shared.own(torch.stack([state["mean_square"] for state in states]))
            olds = old.split([1] if stored.transposed else stored.rows, dim=1)
            pairs = zip(parts, olds, strict=True)
            even = [matrix_steps.one_length_per_neuron(part.to(u.dtype), x, inputs) for part, x in pairs]
            parts = [part for part, _ in even]
            for state, new in zip(states, shared.of_all(torch.cat([new for _, new in even], dim=1)), strict=True):
                self._keep(state["mean_square"], new)
        return shared.to_rows(torch.cat(parts, dim=1)).to(u.dtype).unbind()

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            for name in ("exp_avg", "exp_avg_sq") if self.direction == "adam" else ("momentum_buffer",):
                state[name] = torch.zeros_like(weight)
            if self.direction == "normuon":
                n, d = weight.shape
                shape = (1, d) if self.matrices[weight].transposed else (n, 1)
                state["mean_square"] = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        return state

    def _products(self, weight: Tensor, u: Tensor) -> Tensor:
        """This rank's part of |W|^2, <W, u> and |u|^2 for the matrices of a stored one: `(matrices, 3)` fp64."""
        w = local_rows(weight)
        pairs = [(w[own], u[own]) for own in self._own(weight)]
        products = [(x * y).sum(dtype=torch.float64) for w, u in pairs for x, y in ((w, w), (w, u), (u, u))]
        return torch.stack(products).view(-1, 3)

    def _move(self, weight: Tensor, u: Tensor, factors: Sequence[Any]) -> None:
        """W <- keep W - move u for the matrices of a stored one. factors: keep and move of each."""
        w = local_rows(weight)
        for own, (keep, move) in zip(self._own(weight), factors, strict=True):
            self._keep(w[own], keep * w[own] - move * u[own])

    def _own(self, weight: Tensor) -> list[slice]:
        """This rank's rows of each matrix of a stored one, among its rows of the stored one."""
        first, n = first_row(weight), len(local_rows(weight))
        ends = [min(max(end - first, 0), n) for end in accumulate(self.matrices[weight].rows, initial=0)]
        return [slice(*ends_of) for ends_of in pairwise(ends)]

    def _keep(self, old: Tensor, new: Tensor) -> None:
        """old <- new, this rank's rows, unless the step is skipped."""
        old = local_rows(old)
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf != 0, old, new))


def over_shards(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of x over the ranks that share the weight's rows; collective if it is sharded."""
    if not isinstance(weight, DTensor):
        return x
    mesh = weight.device_mesh
    return DTensor.from_local(x, mesh, [*[Replicate()] * (mesh.ndim - 1), Partial()]).full_tensor()


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
