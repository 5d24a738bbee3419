"""The vectors of a model as they are in use: gains, NormFormer's lambda, nGPT's effective alpha and s."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import canonical
from ngpt_train.observe.telemetry.step_numbers import Numbers, Record


class Vectors:
    """Smallest, mean and largest entry of each vector after the step. Vectors are whole on every rank."""

    def __init__(self, model: Decoder, is_main: bool, device: torch.device) -> None:
        self.is_main, self.device = is_main, device
        self.model = model
        values = dict(vectors_in_use(model))
        self.names = list(values)
        self.by_size: dict[int, list[str]] = {}
        for name, value in values.items():
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
