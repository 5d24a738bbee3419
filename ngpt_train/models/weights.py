"""Weights under canonical names and full shapes, whatever the model fuses, shards or wraps.

Names are listed in docs/weights.md: `embedding`, `output`, `layers.{i}.wq`, `layers.{i}.alpha_attn`, ...
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ngpt_train.core.errors import DataError
from ngpt_train.models.layers.linear import FusedLinear

# Steps of a parameter's path that are in no name: a block's two halves, wrappers of torch, and the one vector of a
# norm or a scale, which is called as the norm is.
_NOT_IN_NAME = frozenset({"attention", "mlp", "module", "_orig_mod", "gain", "stored"})


@torch.no_grad()
def write_full(parameter: Tensor, values: Tensor) -> None:
    """Copies `values`, the whole tensor, into a parameter that may be sharded over ranks (no communication)."""
    if isinstance(parameter, DTensor):
        values = values.to(parameter.device)
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(values)


def export_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights, full and unsharded, by canonical name; a collective call when sharded."""
    return {
        name: part.clone()
        for parameter, parts in named_weights(model)
        for name, part in zip(map(canonical, parts), _cut(parameter, parts), strict=True)
    }


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies full tensors by canonical name into the model, as they are (no projection).

    Raises DataError that names every missing or unknown name and every wrong shape; the model is
    then unchanged. Raises ValueError for a model on `meta`, which has no values.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("load_weights: the model is on meta; give it memory first, with model.to_empty(device=...)")
    wanted = {
        canonical(path): (rows, *parameter.shape[1:])
        for parameter, parts in named_weights(model)
        for path, rows in parts.items()
    }
    problems = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in weights]
    problems += [f"unknown: {name} {tuple(weights[name].shape)}" for name in weights if name not in wanted]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, the model wants {shape}"
        for name, shape in wanted.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise DataError("These weights do not fit the model:\n  " + "\n  ".join(problems))
    for parameter, parts in named_weights(model):
        write_full(parameter, torch.cat([weights[canonical(path)] for path in parts]))


def export_gradients(model: nn.Module) -> dict[str, Tensor]:
    """As `export_weights`, of the gradients that there are."""
    return {
        name: part.clone()
        for parameter, parts in named_weights(model)
        if parameter.grad is not None
        for name, part in zip(map(canonical, parts), _cut(parameter.grad, parts), strict=True)
    }


def named_weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, dict[str, int]]]:
    """The model's parameters, each with the paths of the matrices (or vectors) that lie one below the other in it, and
    their rows. Raises ValueError where two weights have one canonical name."""
    fused = {
        f"{place}.{name}": {".".join([*place.split(".")[:-1], part]): rows for part, rows in parts.items()}
        for place, module in model.named_modules()
        if isinstance(module, FusedLinear)
        for name, parts in module.parts().items()
    }
    paths: dict[str, str] = {}  # by canonical name
    for path, parameter in model.named_parameters():
        parts = fused.get(path, {path: len(parameter)})
        for part in parts:
            if (other := paths.setdefault(canonical(part), part)) != part:
                raise ValueError(f"{type(model).__name__}: two weights are called {canonical(part)}: {other}, {part}")
        yield parameter, parts


def canonical(path: str) -> str:
    """The name of a weight, of where it lies in the model."""
    return ".".join(step for step in path.split(".") if step not in _NOT_IN_NAME)


def _cut(tensor: Tensor, parts: Mapping[str, int]) -> tuple[Tensor, ...]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().split(list(parts.values()))
