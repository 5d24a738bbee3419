"""Every architecture once: the framework's model beside the reference that holds it to account."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.models import Decoder, build_model, load_weights
from ngpt_train.models.angpt.keys import AnGPTConfig
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.models.ngpt.keys import (
    AlphaConfig,
    MLPScaleConfig,
    NGPTConfig,
    QKScaleConfig,
    ScaledConfig,
    ScaleVectorConfig,
)
from ngpt_train.models.normformer.keys import NormFormerConfig
from ngpt_train.models.ntransformer.keys import NTransformerConfig
from ngpt_train.models.powernorm.keys import PowerNormConfig
from tests.reference import angpt, composed, gpt, ngpt, ntransformer, powernorm

Shapes = dict[str, tuple[int, ...]]
Scales = dict[str, tuple[str, float | str, float | str]]  # words such as 1/L: of tests without a reference


@dataclass(frozen=True)
class Architecture:
    config: type[ModelConfig]
    shapes: Callable[..., Shapes]
    random_weights: Callable[[Shapes, int], dict[str, Tensor]]
    forward: Callable[..., Tensor]
    n_params: Callable[[Any], int]  # of a config of the paper's, by its formula
    options: dict[str, Any] = field(default_factory=dict)
    embedding_std: Callable[[int], float] = lambda d_model: 0.02  # at the start, off the sphere

    @property
    def has_encoder(self) -> bool:
        return issubclass(self.config, EncoderDecoderKeys)

    def logits(self, weights: dict[str, Tensor], tokens: Tensor, size: "Size", doc_ids: Tensor | None = None) -> Tensor:
        """The reference's."""
        source = {"source": size.source_context} if self.has_encoder else {}
        return self.forward(weights, tokens, n_heads=size.n_heads, doc_ids=doc_ids, **source)

    @property
    def on_sphere(self) -> bool:
        return issubclass(self.config, NGPTConfig)

    @property
    def starts_on_sphere(self) -> bool:
        return issubclass(self.config, ScaledConfig)


def gpt_with(**options: Any) -> Architecture:
    table = partial(gpt.shapes, **gpt_shape(options))
    told = {name: options[name] for name in ("rope_layout", "activation", "logit_soft_cap") if name in options}
    forward = partial(gpt.forward, **told)
    return Architecture(GPTConfig, table, gpt.random_weights, forward, gpt.n_params, options)


def gpt_shape(options: dict[str, Any]) -> dict[str, Any]:
    """The options that change names or shapes of weights, as arguments of the reference's `shapes`."""
    names = {"qk_norm": "qk_norm", "tied_embeddings": "tied", "mlp": "mlp"}
    return {names[name]: value for name, value in options.items() if name in names}


def gpt_encoder_decoder_with(**options: Any) -> Architecture:
    """Its reference is the composed one, whose defaults are GPT's but for the eps of norms."""
    told = {"norm_eps": 1e-6} | {name: value for name, value in options.items() if name in composed.DEFAULTS}

    def forward(*arguments: Any, **more: Any) -> Tensor:
        return gpt.capped(composed.forward(*arguments, **more, **told), options.get("logit_soft_cap"))

    tables = partial(composed.shapes, **told), gpt.random_weights
    formula = ntransformer.baseline_n_params
    return Architecture(GPTEncoderDecoderConfig, *tables, forward, formula, options)


def spherical(
    config: type[ModelConfig], reference: Any, scales: Scales | None, options: dict[str, Any]
) -> Architecture:
    """`scales`: kind, init and scale, if they differ from the paper's."""
    kinds = {"s_qk": QKScaleConfig, "s_z": ScaleVectorConfig, "s_u": MLPScaleConfig, "s_v": MLPScaleConfig}
    chosen = {name: kinds.get(name, AlphaConfig)(*three) for name, three in (scales or {}).items()}
    shared = options.pop("shared_s_qk", False)
    if shared:
        chosen["s_qk"] = QKScaleConfig(shared=True)
    parametrization = options.get("constraint") == "parametrization"
    told = {name: x for name, x in options.items() if name not in ("constraint", "tied_embeddings")}
    return Architecture(
        config,
        partial(reference.shapes, scales=scales, tied=options.get("tied_embeddings", False), shared_s_qk=shared),
        partial(reference.random_weights, scales=scales, parametrization=parametrization),
        partial(reference.forward, scales=scales, parametrization=parametrization, **told),
        reference.n_params,
        options | chosen,
    )


def ngpt_with(scales: Scales | None = None, **options: Any) -> Architecture:
    return spherical(NGPTConfig, ngpt, scales, options)


def ntransformer_with(scales: Scales | None = None, **options: Any) -> Architecture:
    return spherical(NTransformerConfig, ntransformer, scales, options)


def angpt_with(**options: Any) -> Architecture:
    told = {name: x for name, x in options.items() if name in ("rope_layout", "rope_base")}
    table = partial(angpt.shapes, tied=options.get("tied_embeddings", False))
    forward = partial(angpt.forward, **told)
    return Architecture(AnGPTConfig, table, angpt.random_weights, forward, angpt.n_params, options)


def normformer_with(**options: Any) -> Architecture:
    """Its reference is the composed one."""
    words = as_composed(options)
    functions = (composed.random_weights, partial(composed.forward, **words), composed.normformer_n_params)
    table = partial(composed.shapes, context=CONTEXT, **words)
    # It is multiplied by sqrt(d_model) where it is read.
    return Architecture(NormFormerConfig, table, *functions, options, lambda d_model: 0.5 * d_model**-0.5)


def as_composed(options: dict[str, Any]) -> dict[str, Any]:
    """NormFormer with these options, in the words of the composed decoder."""
    renamed: dict[str, tuple[str, dict[Any, str]]] = {
        "post_attn_norm": ("attn_norm_placement", {True: "peri", False: "pre"}),
        "ffn_norm": ("ffn_norm", {True: "norm", False: "none"}),
        "res_scale": ("res_scale", {True: "mlp", False: "none"}),
    }
    words = dict(NORMFORMER)
    for name, value in options.items():
        word, meaning = renamed.get(name, (name, {}))
        words[word] = meaning.get(value, value)
    return words


def powernorm_with(**options: Any) -> Architecture:
    """Without a forward pass of the reference: its norms have a state, and a test of their own."""
    chosen = {"psi_warmup_steps": 0, "group_scaling": 4} | options

    def forward(*_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("tests/unit/models/test_powernorm.py")

    tables = (powernorm.shapes, powernorm.random_weights)
    return Architecture(PowerNormConfig, *tables, forward, powernorm.n_params, chosen)


def composed_with(config: type[ModelConfig] = ComposedConfig, **options: Any) -> Architecture:
    used = {name: value for name, value in options.items() if name in composed.DEFAULTS}
    functions = (composed.random_weights, partial(composed.forward, **used), composed.n_params)
    embedding_std = (lambda d_model: 0.5 * d_model**-0.5) if options.get("scaled_embedding") else lambda d_model: 0.02
    no_statistics = {"psi_warmup_steps": 0, "group_scaling": 0}
    table = partial(composed.shapes, context=CONTEXT, **used)
    return Architecture(config, table, *functions, no_statistics | options, embedding_std)


def composed_encoder_decoder_with(**options: Any) -> Architecture:
    return composed_with(ComposedEncoderDecoderConfig, **options)


CONTEXT = 96
NORMFORMER: dict[str, Any] = {  # in the words of the composed decoder
    "norm": "layer",
    "attn_norm_placement": "peri",
    "ffn_norm": "norm",
    "head_scale": "before",
    "mlp": "plain",
    "activation": "gelu",
    "bias": True,
    "positions": "sinusoidal",
    "scaled_embedding": True,
    "tied_embeddings": True,
}
# Each keeps the whole contract.
ARCHITECTURES = {
    "angpt": angpt_with(),
    "composed": composed_with(),
    "composed+post": composed_with(norm="layer", norm_placement="post", bias=True, ffn_norm="gain", res_scale="both"),
    "gpt": gpt_with(),
    "gpt+qk_norm": gpt_with(qk_norm=True),
    "gpt+plain_mlp": gpt_with(mlp="plain"),
    "ngpt": ngpt_with(),
    "normformer": normformer_with(),
    "powernorm": powernorm_with(),
    "gpt_encoder_decoder": gpt_encoder_decoder_with(),
    "gpt_encoder_decoder+qk_norm": gpt_encoder_decoder_with(qk_norm=True),
    "ntransformer": ntransformer_with(),
    "composed_encoder_decoder": composed_encoder_decoder_with(),
    "composed_encoder_decoder+normformer": composed_encoder_decoder_with(**NORMFORMER),
}
BASELINE = {"post_attn_norm": False, "ffn_norm": False, "head_scale": "none"}
SCALARS = {
    "s_qk": ("scalar", 1.0, 0.3),
    "s_u": ("scalar", 0.5, 1.0),
    "s_v": ("scalar", 1.2, 0.25),
    "s_z": ("scalar", 3.0, 0.5),
    "alpha_attn": ("scalar", 0.05, 0.1),
    "alpha_mlp": ("scalar", 0.25, 0.1),
}
# Attention by LERP, the MLP by SLERP half way, one s_qk for all heads, and the eps of Norm: engpt, but for the eps's
# size, which is such that the tests see it.
ENGPT_SCALES: Scales = {"alpha_mlp": ("fixed", 0.5, 1.0)}
ENGPT = {"update_mlp": "slerp", "shared_s_qk": True, "norm_eps": 1e-2, "constraint": "parametrization"}
FIXED = {
    "s_qk": ("fixed", 1.5, 0.3),
    "s_u": ("fixed", 0.5, 1.0),
    "s_v": ("fixed", 1.2, 0.25),
    "s_z": ("fixed", 9.0, 0.5),
    "alpha_attn": ("fixed", 0.1, 0.1),
    "alpha_mlp": ("fixed", 0.25, 0.1),
}
STARTS = {
    "s_qk": ("vector", 0.33, 1.0),
    "s_u": ("vector", 0.1, 0.2),
    "s_v": ("vector", 0.7, 0.3),
    "s_z": ("vector", 6.0, 1.0),
    "alpha_attn": ("vector", 0.1, 0.5),
    "alpha_mlp": ("vector", 0.2, 0.1),
}
# Options, each held to the equations.
VARIANTS = {
    "angpt tied": angpt_with(tied_embeddings=True, rope_base=50.0),
    "angpt interleaved": angpt_with(rope_layout="interleaved"),
    "composed normformer": composed_with(**NORMFORMER),
    "composed peri": composed_with(norm="layer_no_bias", norm_placement="peri", qk_norm=True, bias=True),
    "composed reordered": composed_with(norm_placement="reordered", res_scale="attn", mlp="plain", activation="relu"),
    "composed mixed": composed_with(attn_norm_placement="post", mlp_norm_placement="reordered", norm="layer_no_gain"),
    "composed layer scale": composed_with(
        norm_placement="peri", layer_scale=1e-5, res_scale="both", norm="layer_plain"
    ),
    "composed cogview": composed_with(**NORMFORMER | {"norm": "cogview", "mlp_norm_placement": "peri"}, norm_eps=1e-2),
    "composed cogview's gradient": composed_with(embedding_gradient=0.1, scaled_embedding=True, tied_embeddings=True),
    "composed dyt": composed_with(norm="dyt", ffn_norm="norm", qk_norm=True, positions="none"),
    "composed derf": composed_with(norm="derf", ffn_norm="norm", qk_norm=True, bias=True),
    "composed separate gains": composed_with(separate_gains=True, norm_placement="peri", bias=True, qk_norm=True),
    "composed plain separate gains": composed_with(separate_gains=True, mlp="plain", activation="relu2"),
    "composed qkv norm": composed_with(norm="layer", qkv_norm=True, head_scale="after", positions="learned"),
    "composed interleaved": composed_with(rope_layout="interleaved", rope_base=50.0, activation="gelu", qkv_norm=True),
    "composed relu2": composed_with(norm_placement="post", mlp="plain", activation="relu2", ffn_norm="norm"),
    "composed_encoder_decoder post": composed_encoder_decoder_with(
        norm="layer", norm_placement="post", bias=True, layer_scale=0.1, res_scale="both"
    ),
    "composed_encoder_decoder peri": composed_encoder_decoder_with(
        norm_placement="peri", qk_norm=True, qkv_norm=False, head_scale="after", ffn_norm="norm", rope_base=50.0
    ),
    "composed_encoder_decoder dyt": composed_encoder_decoder_with(
        norm="dyt", norm_placement="reordered", mlp_norm_placement="pre", positions="none", res_scale="attn"
    ),
    "composed_encoder_decoder separate gains": composed_encoder_decoder_with(separate_gains=True),
    "composed_encoder_decoder cogview": composed_encoder_decoder_with(
        **NORMFORMER | {"norm": "cogview", "qkv_norm": True, "positions": "rotary"}, embedding_gradient=0.1
    ),
    "gpt tied": gpt_with(tied_embeddings=True),
    "gpt gelu": gpt_with(activation="gelu"),
    "gpt plain gelu": gpt_with(mlp="plain", activation="gelu", qk_norm=True),
    "gpt plain relu2": gpt_with(mlp="plain", activation="relu2", tied_embeddings=True),
    "gpt interleaved": gpt_with(rope_layout="interleaved", qk_norm=True),
    "gpt soft cap": gpt_with(logit_soft_cap=3.0),
    "ngpt slerp": ngpt_with(update="slerp"),
    "ngpt riemannian": ngpt_with(update="riemannian"),
    "ngpt blocks": ngpt_with(update="slerp", update_attn="riemannian", update_mlp="lerp"),
    "ngpt slerp in the mlp": ngpt_with(update_mlp="slerp"),
    "ngpt eps": ngpt_with(norm_eps=1e-2),
    "ngpt eps without qk-norm": ngpt_with(norm_eps=1e-2, qk_norm=False, update="riemannian"),
    "ngpt shared s_qk": ngpt_with(shared_s_qk=True),
    "ngpt engpt": ngpt_with(ENGPT_SCALES, **ENGPT),
    "ngpt free alpha": ngpt_with(alpha_sign="free"),
    "ngpt without qk-norm": ngpt_with(qk_norm=False),
    "ngpt without qk-norm, scores of 1": ngpt_with(qk_norm=False, softmax_scale="d/sqrt(d_k)"),
    "ngpt small scores": ngpt_with(softmax_scale="1/sqrt(d_k)"),
    "ngpt gelu": ngpt_with(activation="gelu"),
    "ngpt tied": ngpt_with(tied_embeddings=True),
    "ngpt interleaved": ngpt_with(rope_layout="interleaved"),
    "ngpt parametrization": ngpt_with(constraint="parametrization", tied_embeddings=True),
    "ngpt ball": ngpt_with(constraint="ball"),
    "ngpt unconstrained": ngpt_with(constraint="none"),
    "ngpt scalars": ngpt_with(SCALARS),
    "ngpt fixed": ngpt_with(FIXED),
    "ngpt starts": ngpt_with(STARTS),
    "normformer none of them": normformer_with(**BASELINE),
    "normformer post-attention norm": normformer_with(**BASELINE | {"post_attn_norm": True}),
    "normformer ffn norm": normformer_with(**BASELINE | {"ffn_norm": True}),
    "normformer head scale": normformer_with(**BASELINE | {"head_scale": "before"}),
    "normformer head scale after": normformer_with(**BASELINE | {"head_scale": "after"}),
    "normformer res scale": normformer_with(**BASELINE | {"res_scale": True}),
    "normformer all, after": normformer_with(head_scale="after", res_scale=True, qkv_norm=True, positions="rotary"),
    "normformer learned": normformer_with(positions="learned", activation="relu2", tied_embeddings=False),
    "normformer no bias": normformer_with(bias=False, res_scale=True),
    "gpt_encoder_decoder tied": gpt_encoder_decoder_with(tied_embeddings=True, rope_base=50.0, norm_eps=1e-2),
    "gpt_encoder_decoder gelu": gpt_encoder_decoder_with(activation="gelu"),
    "gpt_encoder_decoder plain": gpt_encoder_decoder_with(mlp="plain"),
    "gpt_encoder_decoder plain gelu": gpt_encoder_decoder_with(mlp="plain", activation="gelu"),
    "gpt_encoder_decoder interleaved": gpt_encoder_decoder_with(rope_layout="interleaved", qk_norm=True),
    "gpt_encoder_decoder soft cap": gpt_encoder_decoder_with(logit_soft_cap=0.7),
    "ntransformer slerp": ntransformer_with(update="slerp"),
    "ntransformer riemannian": ntransformer_with(update="riemannian"),
    "ntransformer blocks": ntransformer_with(update_attn="slerp", update_cross="riemannian"),
    "ntransformer slerp in cross": ntransformer_with(update_cross="slerp", update_mlp="riemannian"),
    "ntransformer eps": ntransformer_with(norm_eps=1e-2),
    "ntransformer shared s_qk": ntransformer_with(shared_s_qk=True),
    "ntransformer engpt": ntransformer_with(ENGPT_SCALES, **ENGPT),
    "ntransformer free alpha": ntransformer_with(alpha_sign="free"),
    "ntransformer without qk-norm": ntransformer_with(qk_norm=False),
    "ntransformer without qk-norm, scores of 1": ntransformer_with(qk_norm=False, softmax_scale="d/sqrt(d_k)"),
    "ntransformer small scores": ntransformer_with(softmax_scale="1/sqrt(d_k)"),
    "ntransformer gelu": ntransformer_with(activation="gelu"),
    "ntransformer tied": ntransformer_with(tied_embeddings=True, rope_base=50.0),
    "ntransformer interleaved": ntransformer_with(rope_layout="interleaved"),
    "ntransformer parametrization": ntransformer_with(constraint="parametrization"),
    "ntransformer unconstrained": ntransformer_with(constraint="none"),
    "ntransformer scalars": ntransformer_with(SCALARS | {"alpha_cross": ("scalar", 0.15, 0.2)}),
    "ntransformer fixed": ntransformer_with(FIXED | {"alpha_cross": ("fixed", 0.15, 0.2)}),
    "ntransformer starts": ntransformer_with(STARTS | {"alpha_cross": ("vector", 0.15, 0.3)}),
}


@dataclass(frozen=True)
class Size:
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int
    d_mlp: int
    # Of encoder-decoders alone: depth of the encoder, and how many tokens of a row it reads.
    n_encoder_layers: int = 3
    source_context: int = 14


SMALL = Size(d_model=32, n_layers=2, n_heads=4, vocab_size=61, n_kv_heads=4, d_mlp=128)
OF_ENCODERS = ("n_encoder_layers", "source_context")


def keys(architecture: Architecture, size: Size) -> dict[str, int]:
    """The size as keys of the architecture's config."""
    return {key: x for key, x in vars(size).items() if architecture.has_encoder or key not in OF_ENCODERS}


def config(architecture: Architecture, size: Size, context: int = CONTEXT) -> ModelConfig:
    return architecture.config(**keys(architecture, size), **architecture.options | {"context": context})


def shapes(architecture: Architecture, size: Size) -> Shapes:
    encoder = {"n_encoder_layers": size.n_encoder_layers} if architecture.has_encoder else {}
    return architecture.shapes(
        size.d_model,
        size.n_layers,
        size.n_heads,
        size.vocab_size,
        n_kv_heads=size.n_kv_heads,
        d_mlp=size.d_mlp,
        **encoder,
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


def source_length(architecture: Architecture, size: Size) -> int:
    """Tokens of a row before the first position with logits."""
    return size.source_context if architecture.has_encoder else 0


def random_batch(architecture: Architecture, size: Size, rows: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """tokens and targets (rows, t), an encoder's source before them: none in it, a quarter of the others -100,
    never all."""
    generator = torch.Generator().manual_seed(seed)
    s = source_length(architecture, size)
    tokens, targets = (torch.randint(size.vocab_size, (rows, s + t), generator=generator) for _ in range(2))
    targets[torch.rand(rows, s + t, generator=generator) < 0.25] = -100
    targets[:, :s] = -100
    targets[0, s] = 0
    return tokens, targets


def documents(architecture: Architecture, size: Size, targets: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """targets and document ids of rows with several documents, the last of them padded; an encoder-decoder has padding
    anywhere in the source and before and after two documents of the decoder."""
    generator = torch.Generator().manual_seed(seed)
    rows, s = len(targets), source_length(architecture, size)
    t = targets.shape[1] - s
    if not s:
        doc_ids = (torch.rand(rows, t, generator=generator) < 0.3).cumsum(1)
        if t > 4:
            doc_ids[-1, -3:] = -1
        return targets.masked_fill(doc_ids < 0, -100), doc_ids
    read = torch.randint(2, (rows, s), generator=generator)
    read[torch.rand(rows, s, generator=generator) < 0.4] = -1
    read[:, -1] = read[:, -1].clamp(min=0)  # nobody has nothing to attend to
    written = torch.arange(t).ge(t // 2).long().repeat(rows, 1)
    if t > 4:
        written[0, :2] = -1
        written[-1, -2:] = -1
    doc_ids = torch.cat([read, written], 1)
    return targets.masked_fill(doc_ids < 0, -100), doc_ids


def error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest expected value (at least `floor`)."""
    assert actual.shape == expected.shape
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=floor)).item()
