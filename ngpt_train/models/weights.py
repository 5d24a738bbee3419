"""Weights under canonical names and full shapes, whatever the model fuses, shards or wraps.

Names are listed in docs/weights.md: `embedding`, `output`, `layers.{i}.wq`, `layers.{i}.alpha_attn`, ...
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ngpt_train.config.keys import DataError

# Steps of a parameter's path that say how the code is organised or wrapped, not which weight it is.
_NOT_IN_NAME = re.compile(r"(^|\.)(module|_orig_mod|attention|mlp|stored|gain)(?=\.|$)")


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
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named_weights(model)
    }


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies full tensors by canonical name into the model, as they are (no projection).

    Raises DataError that names every missing or unknown name and every wrong shape; the model is
    then unchanged. Raises ValueError for a model on `meta`, which has no values.
    """
    parameters = dict(named_weights(model))
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError("load_weights: the model is on meta; give it memory first, with model.to_empty(device=...)")
    problems = [f"missing: {name} {tuple(parameters[name].shape)}" for name in parameters if name not in weights]
    problems += [f"unknown: {name} {tuple(weights[name].shape)}" for name in weights if name not in parameters]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, the model wants {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if problems:
        raise DataError("These weights do not fit the model:\n  " + "\n  ".join(problems))
    for name, parameter in parameters.items():
        write_full(parameter, weights[name])


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under their canonical names."""
    for path, parameter in model.named_parameters():
        yield _NOT_IN_NAME.sub("", path).lstrip("."), parameter
