"""Norms of gradients, weights and updates, and the angles that rows turn, of each weight and each layer."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.models import Decoder
from ngpt_train.models.weights import canonical, named_weights
from ngpt_train.observe.telemetry.numbers import Numbers, Record, norms, ratio

SHORTEST = 1e-30  # no divisor is smaller: a row of zeros has no direction


@dataclass(frozen=True)
class Weight:
    """The rows of one weight that this rank holds: `rows` of its share of parameter number `index`."""

    name: str  # canonical
    index: int
    rows: slice
    n_rows: int  # of the whole weight
    is_matrix: bool


class WeightChanges:
    """Needs, from before the optimizer's step to after it, the memory of one copy of this rank's weights.

    Sums over ranks: under FSDP2 each rank adds the rows that it holds. What all ranks hold whole, rank 0 adds alone.
    """

    def __init__(self, model: Decoder, is_main: bool, device: torch.device) -> None:
        self.device = device
        self.parameters: list[Tensor] = []
        self.parts: list[Weight] = []
        adds: list[bool] = []  # whether this rank adds the part
        for index, (parameter, rows_by_path) in enumerate(named_weights(model)):
            self.parameters.append(parameter)
            first, n_held = first_row(parameter), len(local(parameter))
            start = 0
            for path, n_rows in rows_by_path.items():
                low, high = (min(max(row - first, 0), n_held) for row in (start, start + n_rows))
                self.parts.append(Weight(canonical(path), index, slice(low, high), n_rows, parameter.ndim == 2))
                adds.append(is_main or isinstance(parameter, DTensor))
                start += n_rows
        self.turning = [part for part in self.parts if part.is_matrix and model.on_sphere]
        self.adds = torch.tensor(adds, dtype=torch.float64, device=device)
        turning = [add for add, part in zip(adds, self.parts, strict=True) if part in self.turning]
        self.adds_angle = torch.tensor(turning, dtype=torch.float64, device=device)

    def before_update(self, loss_scale: Tensor | None) -> None:
        """Takes the gradients, and a copy of the weights. loss_scale: 0-dim, by which the gradients are multiplied."""
        # A weight without a gradient has a part without elements.
        gradients = [
            local(parameter).new_zeros(0) if parameter.grad is None else local(parameter.grad)
            for parameter in self.parameters
        ]
        scale = 1 if loss_scale is None else loss_scale
        self._grad_l1, self._grad_l2 = (self._norms(gradients, order) / scale for order in (1, 2))
        self._weights = [local(parameter).clone() for parameter in self.parameters]
        self._before = self._norms(self._weights, 2)
        self._lengths = self._row_lengths(self._weights)

    def after_update(self) -> Numbers:
        after = [local(parameter.detach()) for parameter in self.parameters]
        moved = self._weights
        torch._foreach_sub_(moved, after)  # in the place of the copy
        squares = (self._grad_l2, self._before, self._norms(after, 2), self._norms(moved, 2))
        sums = [self._grad_l1, *(norm.square() for norm in squares)]
        angles = self._angles(moved, after)
        summed = [*(self.adds * each for each in sums), self.adds_angle * norms(angles, 1, self.device)]
        largest = norms(angles, math.inf, self.device)
        del self._weights, self._lengths
        return Numbers(torch.cat(summed), largest)

    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        found: Record = {}
        n = len(self.parts)
        columns = [summed[first : first + n] for first in range(0, 5 * n, n)]
        sums = {part.name: list(values) for part, values in zip(self.parts, zip(*columns, strict=True), strict=True)}
        for name, (grad_l1, grad, before, after, moved) in (sums | by_layer(sums)).items():
            found[f"grad_l1/{name}"] = grad_l1
            found[f"grad_l2/{name}"] = math.sqrt(grad)
            found[f"weight_l2/{name}"] = math.sqrt(after)
            found[f"update_ratio/{name}"] = ratio(math.sqrt(moved), math.sqrt(before))
        for part, total, most in zip(self.turning, summed[5 * n :], largest, strict=True):
            found[f"angle_mean/{part.name}"] = total / part.n_rows
            found[f"angle_max/{part.name}"] = most
        return found

    def _norms(self, tensors: Sequence[Tensor], order: float) -> Tensor:
        """Of each part, `(parts,)` fp64."""
        return norms([tensors[part.index][part.rows] for part in self.parts], order, self.device)

    def _row_lengths(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Of the rows of each parameter with parts that turn."""
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        indices = dict.fromkeys(part.index for part in self.turning)
        return [torch.linalg.vector_norm(matrices[index], dim=-1, dtype=dtype) for index in indices]

    def _angles(self, moved: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
        """The angle in radians between each row u before the step and v after it; a tensor for each part that turns.

        The chord between their directions is |u/|u| - v/|v||, and chord^2 = (|u - v|^2 - (|u| - |v|)^2) / (|u| |v|).
        This form is exact for small angles too, because u - v is, and needs no rows of exactly length 1.
        """
        if not self.turning:
            return []
        u, v, u_minus_v = (torch.cat(x) for x in (self._lengths, self._row_lengths(after), self._row_lengths(moved)))
        chord = ((u_minus_v.square() - (u - v).square()) / (u * v).clamp(min=SHORTEST)).clamp(0, 4).sqrt()
        angles = iter((2 * (chord / 2).asin()).split([len(lengths) for lengths in self._lengths]))
        by_index = {index: next(angles) for index in dict.fromkeys(part.index for part in self.turning)}
        return [by_index[part.index][part.rows] for part in self.turning]


def by_layer(sums: dict[str, list[float]]) -> dict[str, list[float]]:
    """The sums of all weights of each layer, under the layer's name, `layers.0`."""
    layers: dict[str, list[float]] = {}
    for name, values in sums.items():
        if found := re.match(r"\w+\.\d+(?=\.)", name):
            layer = layers.setdefault(found[0], [0.0] * len(values))
            layers[found[0]] = [a + b for a, b in zip(layer, values, strict=True)]
    return layers


def local(tensor: Tensor) -> Tensor:
    """The rows of `tensor` that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def first_row(tensor: Tensor) -> int:
    """The place of this rank's first row in the whole. FSDP2 gives each rank as many rows, but fewer to the last."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    return min(mesh.get_local_rank() * -(-len(tensor) // mesh.size()), len(tensor))
