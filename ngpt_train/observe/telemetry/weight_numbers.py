"""Norms of gradients, weights and updates, the angles of turning rows, and the vectors as they are in use: gains,
NormFormer's lambda, nGPT's effective alpha and s."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ngpt_train.models.decoder import Decoder
from ngpt_train.models.rank_rows import first_row, is_sharded, local_rows, replicas
from ngpt_train.models.weights import canonical, named_weights
from ngpt_train.observe.telemetry import Numbers, Record, norms, ratio

SHORTEST = 1e-30  # no divisor is smaller: a row of zeros has no direction


@dataclass(frozen=True)
class Weight:
    """This rank's rows of a weight: `rows` of this rank's share of parameter number `index`."""

    name: str  # canonical
    index: int
    rows: slice
    n_rows: int  # of the whole weight
    is_matrix: bool


class WeightChanges:
    """Norms and angles of a step. During the optimizer's step it holds a copy of this rank's weights.

    Sums over ranks: under FSDP2 each rank adds its rows, under HSDP a share of them. Rank 0 alone adds the parameters
    that all ranks hold whole.
    """

    def __init__(self, model: Decoder, is_main: bool, device: torch.device) -> None:
        self.device = device
        self.parameters: list[Tensor] = []
        self.weights: list[Weight] = []
        adds: list[float] = []  # this rank's share of each weight's sum
        for index, (parameter, rows_by_path) in enumerate(named_weights(model)):
            self.parameters.append(parameter)
            first, n_held = first_row(parameter), len(local_rows(parameter))
            start = 0
            for path, n_rows in rows_by_path.items():
                low, high = (min(max(row - first, 0), n_held) for row in (start, start + n_rows))
                self.weights.append(Weight(canonical(path), index, slice(low, high), n_rows, parameter.ndim == 2))
                adds.append(1 / replicas(parameter) if is_sharded(parameter) else float(is_main))
                start += n_rows
        self.turning = [weight for weight in self.weights if weight.is_matrix]
        self.adds = torch.tensor(adds, dtype=torch.float64, device=device)
        turning = [add for add, weight in zip(adds, self.weights, strict=True) if weight in self.turning]
        self.adds_angle = torch.tensor(turning, dtype=torch.float64, device=device)

    @torch.no_grad()
    def before_update(self, loss_scale: Tensor | None) -> None:
        """Takes the gradients, and a copy of the weights. loss_scale: 0-dim, the factor of the gradients."""
        # A weight without a gradient has an empty tensor, whose norm is 0.
        gradients = [
            local_rows(parameter).new_zeros(0) if parameter.grad is None else local_rows(parameter.grad)
            for parameter in self.parameters
        ]
        scale = 1 if loss_scale is None else loss_scale
        self._grad_l1, self._grad_l2 = (self._norms(gradients, order) / scale for order in (1, 2))
        self._copy = [local_rows(parameter).clone() for parameter in self.parameters]
        self._before = self._norms(self._copy, 2)
        self._lengths = self._row_lengths(self._copy)

    @torch.no_grad()
    def after_update(self) -> Numbers:
        after = [local_rows(parameter) for parameter in self.parameters]
        moved = self._copy
        torch._foreach_sub_(moved, after)  # in the place of the copy
        squares = (self._grad_l2, self._before, self._norms(after, 2), self._norms(moved, 2))
        sums = [self._grad_l1, *(norm.square() for norm in squares)]
        angles = self._angles(moved, after)
        summed = [*(self.adds * each for each in sums), self.adds_angle * norms(angles, 1, self.device)]
        largest = norms(angles, math.inf, self.device)
        del self._copy, self._lengths
        return Numbers(torch.cat(summed), largest)

    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        found: Record = {}
        n = len(self.weights)
        columns = [summed[first : first + n] for first in range(0, 5 * n, n)]
        sums = dict(zip((weight.name for weight in self.weights), zip(*columns, strict=True), strict=True))
        for place, names in places(sums).items():
            grad_l1, grad, before, after, moved = (
                sum(column) for column in zip(*(sums[name] for name in names), strict=True)
            )
            found[f"grad_l1/{place}"] = grad_l1
            found[f"grad_l2/{place}"] = math.sqrt(grad)
            found[f"weight_l2/{place}"] = math.sqrt(after)
            found[f"update_ratio/{place}"] = ratio(math.sqrt(moved), math.sqrt(before))
        angles = zip(self.turning, summed[5 * n :], largest, strict=True)
        turned = {weight.name: (total, weight.n_rows, most) for weight, total, most in angles}
        for place, names in places(turned).items():
            totals, n_rows, most = zip(*(turned[name] for name in names), strict=True)
            found[f"angle_mean/{place}"], found[f"angle_max/{place}"] = sum(totals) / sum(n_rows), max(most)
        return found

    def _norms(self, tensors: Sequence[Tensor], order: float) -> Tensor:
        """The norm of each weight, `(weights,)` fp64."""
        return norms([tensors[weight.index][weight.rows] for weight in self.weights], order, self.device)

    def _row_lengths(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The lengths of rows, for each parameter in `turning`."""
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        indices = dict.fromkeys(weight.index for weight in self.turning)
        return [torch.linalg.vector_norm(matrices[index], dim=-1, dtype=dtype) for index in indices]

    def _angles(self, moved: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
        """The angle in radians between each row u before the step and v after it, for each weight in `turning`.

        The chord between their directions is |u/|u| - v/|v||, and chord^2 = (|u - v|^2 - (|u| - |v|)^2) / (|u| |v|).
        This form is exact for small angles, because u - v is exact, and holds for rows of any length.
        """
        u, v, u_minus_v = (torch.cat(x) for x in (self._lengths, self._row_lengths(after), self._row_lengths(moved)))
        chord = ((u_minus_v.square() - (u - v).square()) / (u * v).clamp(min=SHORTEST)).clamp(0, 4).sqrt()
        angles = iter((2 * (chord / 2).asin()).split([len(lengths) for lengths in self._lengths]))
        by_index = {index: next(angles) for index in dict.fromkeys(weight.index for weight in self.turning)}
        return [by_index[weight.index][weight.rows] for weight in self.turning]


def places(names: Iterable[str]) -> dict[str, list[str]]:
    """The weights at each place: a weight's name stands for itself, a layer, `layers.0`, for all of its weights."""
    found = {name: [name] for name in names}
    for name in list(found):
        if layer := re.match(r"\w+\.\d+(?=\.)", name):
            found.setdefault(layer[0], []).append(name)
    return found


class Vectors:
    """Smallest, mean and largest entry of each vector after the step. Vectors are whole on every rank."""

    def __init__(self, model: Decoder, is_main: bool, device: torch.device) -> None:
        self.is_main, self.device = is_main, device
        self.model = model
        self.by_size: dict[int, list[str]] = {}
        for name, value in dict(vectors_in_use(model)).items():
            self.by_size.setdefault(len(value), []).append(name)

    @torch.no_grad()
    def after_update(self) -> Numbers:
        """Takes vectors of one size together: a few launches for all layers."""
        values = dict(vectors_in_use(self.model))
        found: list[Tensor] = []
        for names in self.by_size.values():
            same = torch.stack([values[name] for name in names]).double()  # (names, size)
            found.append(torch.stack([same.amin(1), same.mean(1), same.amax(1)], dim=1).flatten())
        summed = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64, device=self.device)
        return Numbers(summed * self.is_main, summed[:0])

    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        found: Record = {}
        names = (name for names in self.by_size.values() for name in names)
        for number, name in enumerate(names):
            smallest, mean, most = summed[3 * number : 3 * number + 3]
            found |= {f"value_min/{name}": smallest, f"value_mean/{name}": mean, f"value_max/{name}": most}
        return found


def vectors_in_use(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every vector of the model but biases, with its canonical name.

    A module with an attribute `stored` holds a vector in another form than the model uses, such as nGPT's alpha: called
    without arguments, the module returns the vector in use.
    """
    for place, module in model.named_modules():
        if hasattr(module, "stored"):
            yield canonical(place), module()
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1 and name != "bias":
                yield canonical(f"{place}.{name}" if place else name), parameter
