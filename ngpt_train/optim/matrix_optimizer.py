"""Matrix optimizers of the blocks' matrices, with torch's fused Adam for all other parameters, in one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ngpt_train.models.layers.linear import OutputLinear
from ngpt_train.models.weights import named_weights
from ngpt_train.optim.matrix_steps import (
    adam_direction,
    adjustment,
    ball_factors,
    one_length_per_neuron,
    orthogonalised,
)
from ngpt_train.optim.row_adam import first_row, local_rows

if TYPE_CHECKING:
    from ngpt_train.config.sections.optim import OptimConfig
    from ngpt_train.models.decoder import Decoder


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


class MatrixOptimizer(torch.optim.Adam):
    """The steps of matrix_steps.py for `matrices`, AdamW's for all other parameters of the groups.

    A stored matrix is taken apart: W_q, W_k and W_v have a step each. dtype: of Newton-Schulz.

    State has Adam's keys, and for Muon `step`, `momentum_buffer` and NorMuon's `mean_square`, whole on every rank:
    `(rows, 1)`, or `(1, d_model)` of a transposed matrix.

    Under FSDP2 each rank gathers what Newton-Schulz is of, one stored matrix at a time, and takes its own rows of the
    result; Hyperball adds up lengths over the shards in one all-reduce. Under DDP every rank computes all of it.
    `grad_scale` and `found_inf` are as in torch's fused optimizers: if found_inf is 1, no bit changes.
    """

    def __init__(
        self, groups: list[dict[str, Any]], matrices: Mapping[Tensor, Stored], config: OptimConfig, dtype: torch.dtype
    ) -> None:
        beta1, beta2 = config.betas
        super().__init__(groups, lr=0.0, betas=(beta1, beta2), eps=config.eps, fused=True, decoupled_weight_decay=True)
        assert config.matrix_step is not None
        self.direction, self.keeps_norm = config.matrix_step
        # Null where they have no part in the step.
        self.momentum, self.nesterov = config.momentum or 0.0, config.nesterov
        self.adjust_lr = config.adjust_lr or "original"
        self.matrices, self.dtype = dict(matrices), dtype

    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        """Leaves the matrices out of torch's step."""
        others = [parameter for parameter in group["params"] if parameter not in self.matrices]
        return super()._init_group(group | {"params": others}, *found)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient, and their moments. Takes no closure."""
        assert closure is None
        found = [(group, x) for group in self.param_groups for x in group["params"] if x in self.matrices]
        moving = [(group, weight) for group, weight in found if weight.grad is not None]
        if self.keeps_norm:
            directions = [self._direction(weight, group) for group, weight in moving]
            weights = [weight for _, weight in moving]
            products = over_shards(torch.cat(list(map(self._products, weights, directions))), weights)
            n_each = [len(self.matrices[weight].rows) for weight in weights]
            for (group, weight), u, of_weight in zip(moving, directions, products.split(n_each), strict=True):
                self._move(weight, u, ball_factors(of_weight, group["lr"]).to(weight.dtype).unbind())
        else:
            for group, weight in moving:
                lr, sizes = group["lr"], self.matrices[weight].sizes(weight.shape[1])
                keep = 1 - lr * group["weight_decay"]
                factors = [(keep, lr * adjustment(self.adjust_lr, *size)) for size in sizes]
                self._move(weight, self._direction(weight, group), factors)
        super().step()

    def _direction(self, weight: Tensor, group: Mapping[str, Any]) -> Tensor:
        """u for this rank's rows of a stored matrix. Moves its state."""
        state, stored = self._state_of(weight), self.matrices[weight]
        assert weight.grad is not None
        g, grad_scale = local_rows(weight.grad).to(weight.dtype), getattr(self, "grad_scale", None)
        if grad_scale is not None:
            g = g / grad_scale
        self._keep(state["step"], state["step"] + 1)
        if self.direction == "adam":
            beta1, beta2 = group["betas"]
            m = torch.lerp(local_rows(state["exp_avg"]), g, 1 - beta1)
            v = torch.lerp(local_rows(state["exp_avg_sq"]), g.square(), 1 - beta2)
            self._keep(state["exp_avg"], m)
            self._keep(state["exp_avg_sq"], v)
            return adam_direction(m, v, state["step"], beta1, beta2, group["eps"])
        buffer = torch.lerp(local_rows(state["momentum_buffer"]), g, 1 - self.momentum)
        self._keep(state["momentum_buffer"], buffer)
        u = gathered(torch.lerp(g, buffer, self.momentum) if self.nesterov else buffer, weight)
        parts = [orthogonalised(part).to(weight.dtype) for part in u.to(self.dtype).split(stored.rows)]
        if self.direction == "normuon":
            inputs = 0 if stored.transposed else 1
            old = state["mean_square"].split([1] if stored.transposed else stored.rows)
            even = [one_length_per_neuron(part, each, inputs) for part, each in zip(parts, old, strict=True)]
            parts = [part for part, _ in even]
            self._keep(state["mean_square"], torch.cat([new for _, new in even]))
        first = first_row(weight)
        return torch.cat(parts)[first : first + len(local_rows(weight))]

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
        old, found_inf = local_rows(old), getattr(self, "found_inf", None)
        old.copy_(new if found_inf is None else torch.where(found_inf != 0, old, new))


def gathered(rows: Tensor, like: Tensor) -> Tensor:
    """The whole matrix of which each rank has `rows`, sharded as `like` is; collective if it is."""
    if not isinstance(like, DTensor):
        return rows
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(rows, mesh, placements, shape=like.shape, stride=like.stride()).full_tensor()


def over_shards(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The sum of x over the ranks that share the rows of the weights; collective if they are sharded."""
    weight = weights[0]
    if not isinstance(weight, DTensor):
        return x
    mesh = weight.device_mesh
    return DTensor.from_local(x, mesh, [*[Replicate()] * (mesh.ndim - 1), Partial()]).full_tensor()
