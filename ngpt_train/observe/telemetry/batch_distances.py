"""Distances of a batch's statistics from the running ones, in norms over the batch such as PowerNorm."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import canonical
from ngpt_train.observe.telemetry import Numbers, Record, ratio, stacked

# The symbols of the running statistics that batches move. The symbol of a mean square x stands for sqrt(x + eps).
SYMBOLS = {"psi_squared": "psi", "variance": "sigma", "mu": "mu"}
MEAN_SQUARES = ("psi_squared", "variance")


class RunningStatistics:
    """|psi_B - psi|, with psi before psi_B has moved it; |psi| and |nu| after the step. Euclidean norms.

    The distance is the mean over the micro batches of all ranks that move a running statistic. |psi| and |nu| are means
    over ranks, whose statistics may differ. A norm over the batch is a module with an attribute `on_batch`.
    """

    def __init__(self, model: Decoder, n_ranks: int, device: torch.device) -> None:
        self.n_ranks, self.device = n_ranks, device
        self.norms: dict[str, Any] = {
            canonical(place): module for place, module in model.named_modules() if hasattr(module, "on_batch")
        }
        statistics = [(place, name) for place, norm in self.norms.items() for name in norm.statistics()]
        self.moved = [key for key in statistics if key[1] in SYMBOLS]
        self.after = [key for key in statistics if key[1] in (*SYMBOLS, "nu")]
        self._distances: dict[tuple[str, str], list[Tensor]] = {}
        self._counts: dict[tuple[str, str], list[Tensor]] = {}

    def before_step(self) -> None:
        self._distances = {key: [] for key in self.moved}
        self._counts = {key: [] for key in self.moved}
        for place, norm in self.norms.items():
            norm.on_batch = partial(self._add, place)

    @torch.no_grad()
    def _add(self, place: str, batch: Any) -> None:
        """Adds a micro batch. batch: the norm's BatchStatistics; its values belong to the norm's first statistics."""
        norm, counts = self.norms[place], batch.counts()
        for (name, running), value in zip(norm.statistics().items(), batch.values, strict=False):
            distance = torch.linalg.vector_norm(in_symbols(norm, name, value) - in_symbols(norm, name, running))
            self._distances[place, name].append(torch.where(counts > 0, distance, 0))
            self._counts[place, name].append(counts)

    @torch.no_grad()
    def after_update(self) -> Numbers:
        for norm in self.norms.values():
            norm.on_batch = None
        nothing = torch.zeros((), device=self.device)
        found = [of[key] for of in (self._distances, self._counts) for key in self.moved]
        summed = [torch.stack(values).sum() if values else nothing for values in found]
        for place, name in self.after:
            norm = self.norms[place]
            value = in_symbols(norm, name, norm.statistics()[name])
            summed.append(torch.linalg.vector_norm(value) / self.n_ranks)
        numbers = stacked(summed, self.device)
        return Numbers(numbers, numbers[:0])

    def record(self, summed: Sequence[float], largest: Sequence[float]) -> Record:
        found: Record = {}
        n = len(self.moved)
        for (place, name), distance, count in zip(self.moved, summed[:n], summed[n : 2 * n], strict=True):
            found[f"{SYMBOLS[name]}_distance/{place}"] = ratio(distance, count)
        for (place, name), length in zip(self.after, summed[2 * n :], strict=True):
            found[f"{SYMBOLS.get(name, name)}_l2/{place}"] = length
        return found


def in_symbols(norm: Any, name: str, value: Tensor) -> Tensor:
    """The statistic `name` of a norm as the paper's symbol for it: psi of psi_squared."""
    root: Tensor = norm.root(value) if name in MEAN_SQUARES else value
    return root
