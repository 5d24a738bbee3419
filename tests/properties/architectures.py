"""Every architecture once: the framework's model beside the reference that holds it to account."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.architectures import (
    AlphaConfig,
    GPTConfig,
    MLPScaleConfig,
    ModelConfig,
    NGPTConfig,
    NormFormerConfig,
    PowerNormConfig,
    ScaleVectorConfig,
)
from ngpt_train.models import Decoder, build_model, export_weights, load_weights
from tests.reference import gpt, ngpt, normformer, powernorm

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Architecture:
    config: type[ModelConfig]
    shapes: Callable[..., Shapes]
    random_weights: Callable[[Shapes, int], dict[str, Tensor]]
    forward: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def gpt_with(**options: Any) -> Architecture:
    table = partial(gpt.shapes, qk_norm=options.get("qk_norm", False), tied=options.get("tied_embeddings", False))
    forward = partial(gpt.forward, rope_layout=options.get("rope_layout", "half"))
    return Architecture(GPTConfig, table, gpt.random_weights, forward, options)


def ngpt_with(scales: dict[str, tuple[str, float, float]] | None = None, **options: Any) -> Architecture:
    """`scales`: kind, init and scale of those that are not the paper's."""
    kinds = {"alpha_attn": AlphaConfig, "alpha_mlp": AlphaConfig, "s_u": MLPScaleConfig, "s_v": MLPScaleConfig}
    chosen = {name: kinds.get(name, ScaleVectorConfig)(*three) for name, three in (scales or {}).items()}
    parametrization = options.get("constraint") == "parametrization"
    told = {
        name: options[name]
        for name in ("alpha_sign", "qk_norm", "update", "activation", "rope_layout")
        if name in options
    }
    return Architecture(
        NGPTConfig,
        partial(ngpt.shapes, scales=scales, tied=options.get("tied_embeddings", False)),
        partial(ngpt.random_weights, scales=scales, parametrization=parametrization),
        partial(ngpt.forward, scales=scales, parametrization=parametrization, **told),
        options | chosen,
    )


def normformer_with(**options: Any) -> Architecture:
    told = {name: value for name, value in options.items() if name not in ("tied_embeddings", "activation")}
    used = {name: options[name] for name in ("head_scale", "positions", "activation") if name in options}
    table = partial(normformer.shapes, tied=options.get("tied_embeddings", True), context=CONTEXT, **told)
    return Architecture(
        NormFormerConfig, table, normformer.random_weights, partial(normformer.forward, **used), options
    )


def powernorm_with(**options: Any) -> Architecture:
    """Without a forward pass of the reference: its norms have a state, and a test of their own."""
    chosen = {"psi_warmup_steps": 0, "group_scaling": 4} | options

    def forward(*_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("tests/unit/test_powernorm.py")

    return Architecture(PowerNormConfig, powernorm.shapes, powernorm.random_weights, forward, chosen)


CONTEXT = 96
# Each keeps the whole contract.
ARCHITECTURES = {
    "gpt": gpt_with(),
    "gpt+qk_norm": gpt_with(qk_norm=True),
    "ngpt": ngpt_with(),
    "normformer": normformer_with(),
    "powernorm": powernorm_with(),
}
BASELINE = {"post_attn_norm": False, "ffn_norm": False, "head_scale": "none"}
# Options, each held to the equations.
VARIANTS = {
    "gpt tied": gpt_with(tied_embeddings=True),
    "gpt interleaved": gpt_with(rope_layout="interleaved", qk_norm=True),
    "ngpt slerp": ngpt_with(update="slerp"),
    "ngpt riemannian": ngpt_with(update="riemannian"),
    "ngpt free alpha": ngpt_with(alpha_sign="free"),
    "ngpt without qk-norm": ngpt_with(qk_norm=False),
    "ngpt gelu": ngpt_with(activation="gelu"),
    "ngpt tied": ngpt_with(tied_embeddings=True),
    "ngpt interleaved": ngpt_with(rope_layout="interleaved"),
    "ngpt parametrization": ngpt_with(constraint="parametrization", tied_embeddings=True),
    "ngpt unconstrained": ngpt_with(constraint="none"),
    "ngpt scalars": ngpt_with(
        {
            "s_qk": ("scalar", 1.0, 0.3),
            "s_u": ("scalar", 0.5, 1.0),
            "s_v": ("scalar", 1.2, 0.25),
            "s_z": ("scalar", 3.0, 0.5),
            "alpha_attn": ("scalar", 0.05, 0.1),
            "alpha_mlp": ("scalar", 0.25, 0.1),
        }
    ),
    "ngpt fixed": ngpt_with(
        {
            "s_qk": ("fixed", 1.5, 0.3),
            "s_u": ("fixed", 0.5, 1.0),
            "s_v": ("fixed", 1.2, 0.25),
            "s_z": ("fixed", 9.0, 0.5),
            "alpha_attn": ("fixed", 0.1, 0.1),
            "alpha_mlp": ("fixed", 0.25, 0.1),
        }
    ),
    "ngpt starts": ngpt_with(
        {
            "s_qk": ("vector", 0.33, 1.0),
            "s_u": ("vector", 0.1, 0.2),
            "s_v": ("vector", 0.7, 0.3),
            "s_z": ("vector", 6.0, 1.0),
            "alpha_attn": ("vector", 0.1, 0.5),
            "alpha_mlp": ("vector", 0.2, 0.1),
        }
    ),
    "normformer none of them": normformer_with(**BASELINE),
    "normformer post-attention norm": normformer_with(**BASELINE | {"post_attn_norm": True}),
    "normformer ffn norm": normformer_with(**BASELINE | {"ffn_norm": True}),
    "normformer head scale": normformer_with(**BASELINE | {"head_scale": "before"}),
    "normformer head scale after": normformer_with(**BASELINE | {"head_scale": "after"}),
    "normformer res scale": normformer_with(**BASELINE | {"res_scale": True}),
    "normformer all, after": normformer_with(head_scale="after", res_scale=True, qkv_norm=True, positions="rotary"),
    "normformer learned": normformer_with(positions="learned", activation="relu2", tied_embeddings=False),
    "normformer no bias": normformer_with(bias=False, res_scale=True),
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


def config(architecture: Architecture, size: Size, context: int = CONTEXT) -> ModelConfig:
    return architecture.config(**vars(size), **architecture.options | {"context": context})


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
