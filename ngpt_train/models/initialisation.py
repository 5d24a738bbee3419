"""A model's weights at step 0."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ngpt_train.models.weights import named_weights, write_full

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder

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
            drawn = [
                by_path(seed, path, (rows, *parameter.shape[1:]), model.init_std(path)) for path, rows in parts.items()
            ]
            write_full(parameter, torch.cat(drawn))
    model.project_()
