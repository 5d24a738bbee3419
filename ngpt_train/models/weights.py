"""Weights under canonical names and in full shapes, however the model fuses, shards or wraps them; and at step 0.

Names are listed in docs/weights.md: `embedding`, `output`, `layers.{i}.wq`, `layers.{i}.alpha_attn`, ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ngpt_train.core.errors import DataError
from ngpt_train.models.layers.linear import FusedLinear
from ngpt_train.models.layers.norms import project_rows_
from ngpt_train.models.rank_rows import is_sharded

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder

# Parts of a parameter's path that its canonical name leaves out: the two halves of a block, torch's wrappers, and the
# attribute that holds the only vector of a norm or a scale, which has the name of the norm.
_NOT_IN_NAME = frozenset({"attention", "mlp", "module", "_orig_mod", "gain", "stored"})


@torch.no_grad()
def write_full(parameter: Tensor, values: Tensor) -> None:
    """Copies `values`, the whole tensor, into a parameter that may be sharded over ranks (no communication)."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        values = values.to(parameter.device)
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(values)


def export_weights(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None] = lambda x: x) -> dict[str, Tensor]:
    """Copies of all weights, whole, by canonical name. A collective call if the model is sharded. of: what of each
    parameter is copied, if there is any."""
    found: dict[str, Tensor] = {}
    for parameter, parts in named_weights(model):
        if (tensor := of(parameter)) is not None:
            whole = tensor.full_tensor() if is_sharded(tensor) else tensor
            cut = whole.detach().split(list(parts.values()))
            found |= {canonical(path): part.clone() for path, part in zip(parts, cut, strict=True)}
    return found


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies whole tensors, by canonical name, into the model. It does not project them. Raises DataError, which names
    every missing or unknown name and every wrong shape, and then leaves the model unchanged. Raises ValueError for a
    model on `meta`, which has no memory."""
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
    """Copies of the gradients, as `export_weights`; a weight without gradient is left out."""
    return export_weights(model, lambda parameter: parameter.grad)


def named_weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, dict[str, int]]]:
    """The model's parameters, each with the paths and numbers of rows of the weights that are stacked in it. A
    parameter that is not fused has one path, its own. Raises ValueError if two weights have one canonical name."""
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
    """The canonical name of the weight at `path`: layers.0.attention.wq -> layers.0.wq."""
    return ".".join(part for part in path.split(".") if part not in _NOT_IN_NAME)


# Step 0.

# The key of model.init.* for the matrices outside of blocks; also their field of LrFactors.
OUTSIDE_OF_BLOCKS = {"embedding": "embedding", "source_embedding": "embedding", "output": "output"}


def by_path(seed: int, path: str, shape: tuple[int, ...], std: float) -> Tensor:
    """N(0, std^2) in fp32, drawn on the CPU by a generator that (seed, path) seeds: the same on every device, in every
    layout, and on any number of ranks."""
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(std=std, generator=generator)


def kind_of(path: str) -> str:
    """The key of model.init.* for the matrix at `path`."""
    return "residual" if path.endswith((".wo", ".w_down")) else OUTSIDE_OF_BLOCKS.get(path, "hidden")


def standard_deviations(model: Decoder) -> dict[str, list[float]]:
    """The distinct standard deviations of the matrices at step 0, by the key of model.init.*, the largest first: one
    each, but where an encoder and a decoder differ in depth, and with model.deep_init."""
    found: dict[str, set[float]] = {}
    for parameter, parts in named_weights(model):
        for path in parts if parameter.ndim >= 2 else ():
            found.setdefault(kind_of(path), set()).add(model.init_std(path))
    return {kind: sorted(stds, reverse=True) for kind, stds in found.items()}


@torch.no_grad()
def init_weights_(model: Decoder, seed: int) -> None:
    """Resets vectors and running statistics, draws every matrix from N(0, init_std^2), and imposes the constraint."""
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    for parameter, parts in named_weights(model):
        if parameter.ndim >= 2:
            shapes = {path: (rows, *parameter.shape[1:]) for path, rows in parts.items()}
            drawn = [by_path(seed, path, shape, model.init_std(path)) for path, shape in shapes.items()]
            write_full(parameter, torch.cat(drawn))
            if model.constraint == "ball":
                project_rows_(parameter, "sphere")
    model.project_()
