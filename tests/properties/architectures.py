"""Every architecture once: the framework's model beside the reference that holds it to account."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.schema import GPTConfig, ModelConfig, NGPTConfig
from ngpt_train.models import Decoder, build_model, export_weights, load_weights
from tests.reference import gpt, ngpt

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    config: type[ModelConfig]
    shapes: Callable[..., Shapes]
    random_weights: Callable[[Shapes, int], dict[str, Tensor]]
    forward: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "gpt": Architecture(GPTConfig, gpt.shapes, gpt.random_weights, gpt.forward),
    "gpt+qk_norm": Architecture(
        GPTConfig, partial(gpt.shapes, qk_norm=True), gpt.random_weights, gpt.forward, {"qk_norm": True}
    ),
    "ngpt": Architecture(NGPTConfig, ngpt.shapes, ngpt.random_weights, ngpt.forward),
}


@dataclass(frozen=True)
class Size:
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int
    d_mlp: int


SMALL = Size(d_model=32, n_layers=2, n_heads=4, vocab_size=61, n_kv_heads=4, d_mlp=128)


def config(architecture: Architecture, size: Size, context: int = 64) -> ModelConfig:
    return architecture.config(**vars(size), context=context, **architecture.options)


def shapes(architecture: Architecture, size: Size) -> Shapes:
    return architecture.shapes(
        size.d_model,
        size.n_layers,
        size.n_heads,
        size.vocab_size,
        n_kv_heads=size.n_kv_heads,
        d_mlp=size.d_mlp,
    )


def jittered(
    architecture: Architecture, size: Size, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Decoder, dict[str, Tensor]]:
    """A model with random weights away from their init, and the same weights in fp64 for the reference."""
    weights = {
        name: x.to(dtype).double() for name, x in architecture.random_weights(shapes(architecture, size), seed).items()
    }
    model = build_model(config(architecture, size)).to(dtype)
    load_weights(model, {name: x.to(dtype) for name, x in weights.items()})
    return model, weights


def export_gradients(model: Decoder) -> dict[str, Tensor]:
    """The gradients under their canonical names: put in the parameters' place and exported. Ruins the model."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return export_weights(model)


def random_batch(size: Size, rows: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """tokens and targets (rows, t), a quarter of the targets -100, never all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size.vocab_size, (rows, t), generator=generator)
    targets = torch.randint(size.vocab_size, (rows, t), generator=generator)
    targets[torch.rand(rows, t, generator=generator) < 0.25] = -100
    targets[0, 0] = 0
    return tokens, targets
