"""The keys of model.*: one dataclass per architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

from ngpt_train.config.keys import AUTO, FloatOrAuto, IntOrAuto, key

# What the start of a scale vector may be besides a number.
SCALE_WORDS = ("1/L", "1/sqrt(d)", "sqrt(d)")


@dataclass
class ModelConfig:
    """What every architecture has. The subclasses add what is their own."""

    name: str = key("gpt", "Architecture, chosen with model=NAME.")
    d_model: int = key(128, "Width of the residual stream.", minimum=1, maximum=1_000_000)
    n_layers: int = key(4, "Number of blocks.", minimum=1, maximum=100_000)
    n_heads: int = key(
        4, "Number of attention heads; d_model / n_heads must be even for RoPE.", minimum=1, maximum=1_000_000
    )
    n_kv_heads: Union[int, None] = key(
        None, "Number of key/value heads (grouped-query attention); null is n_heads.", minimum=1, maximum=1_000_000
    )
    d_mlp: Union[int, None] = key(None, "Hidden width of the MLP; null is 4 * d_model.", minimum=1, maximum=10_000_000)
    vocab_size: IntOrAuto = key(
        AUTO, "Rows of both embeddings; auto takes the tokenizer's.", choices=(AUTO,), minimum=2, maximum=10_000_000
    )
    context: int = key(256, "Tokens per training row.", minimum=1, maximum=10_000_000)
    tied_embeddings: bool = key(False, "One matrix as input and output embedding.")
    rope_base: float = key(10000.0, "Base of the rotary position angles.", above=1, maximum=1e12)
    rope_layout: str = key(
        "half",
        "Which dimensions of a head rotate together: half pairs i with i + d_head/2, interleaved 2i with 2i + 1.",
        choices=("half", "interleaved"),
    )


@dataclass
class GPTConfig(ModelConfig):
    """Llama-like baseline: RMSNorm, RoPE, SwiGLU, untied embeddings, no biases."""

    name: str = key("gpt", "Architecture, chosen with model=NAME.")
    norm_eps: float = key(1e-6, "Added to the mean square in RMSNorm.", above=0)
    qk_norm: bool = key(False, "RMSNorm with gain over each head of q and k, before RoPE.")
    activation: str = key("silu", "Gate of the MLP; gelu is the exact one.", choices=("silu", "gelu"))


@dataclass
class ScaleVectorConfig:
    """A scale s of nGPT (section 2.5): stored as `scale` at the start, used as stored * init / scale."""

    kind: str = key(
        "vector",
        "vector: a number per dimension; scalar: one for all of them; fixed: init, never learned.",
        choices=("vector", "scalar", "fixed"),
    )
    init: FloatOrAuto = key(1.0, "Value at the start; L is n_layers, d is d_model.", choices=SCALE_WORDS, above=0)
    scale: FloatOrAuto = key(
        "1/sqrt(d)",
        "Stored value at the start: the larger, the slower Adam moves the value in use (lr * init / scale a step).",
        choices=SCALE_WORDS,
        above=0,
    )


@dataclass
class MLPScaleConfig(ScaleVectorConfig):
    """s_u and s_v, which are stored as they are used."""

    scale: FloatOrAuto = key(1.0, "Stored value at the start, as above.", choices=SCALE_WORDS, above=0)


@dataclass
class AlphaConfig(ScaleVectorConfig):
    """An eigen learning rate: the share of the way that a block moves h."""

    init: FloatOrAuto = key(0.05, "Value at the start, of the order of 1/L.", choices=SCALE_WORDS, above=0)


@dataclass
class NGPTConfig(ModelConfig):
    """Normalized Transformer, section 2.6 of the nGPT paper; the options are its ablations."""

    name: str = key("ngpt", "Architecture, chosen with model=NAME.")
    s_qk: ScaleVectorConfig = field(default_factory=ScaleVectorConfig)
    s_u: MLPScaleConfig = field(default_factory=MLPScaleConfig)
    s_v: MLPScaleConfig = field(default_factory=MLPScaleConfig)
    s_z: ScaleVectorConfig = field(default_factory=ScaleVectorConfig)
    alpha_attn: AlphaConfig = field(default_factory=AlphaConfig)
    alpha_mlp: AlphaConfig = field(default_factory=AlphaConfig)
    alpha_sign: str = key(
        "positive", "positive: |alpha| is used (section 2.2); free: alpha as it is (A.2).", choices=("positive", "free")
    )
    qk_norm: bool = key(True, "Norm in eq. 15 and 16; false leaves s_qk alone (Table 6).")
    update: str = key(
        "lerp",
        "How a block moves h: lerp (eq. 10, 11), slerp (eq. 6) or riemannian (eq. 25, 26), each with Norm around it.",
        choices=("lerp", "slerp", "riemannian"),
    )
    constraint: str = key(
        "projection",
        "projection: rows return to the sphere after each step; parametrization: each forward pass normalises free "
        "rows; none: rows are free.",
        choices=("projection", "parametrization", "none"),
    )
    activation: str = key("silu", "Gate of the MLP; gelu is the exact one.", choices=("silu", "gelu"))


@dataclass
class NormFormerConfig(ModelConfig):
    """Pre-LayerNorm Transformer with the NormFormer paper's extra operations; each switches on and off alone."""

    name: str = key("normformer", "Architecture, chosen with model=NAME.")
    tied_embeddings: bool = key(True, "One matrix as input and output embedding.")
    post_attn_norm: bool = key(True, "LayerNorm of the attention's output.")
    ffn_norm: bool = key(True, "LayerNorm of the MLP's hidden state, after the activation.")
    head_scale: str = key(
        "before",
        "A learned number per head: before W_O (the paper), after it (the authors' code), or none.",
        choices=("before", "after", "none"),
    )
    res_scale: bool = key(False, "ResScale: a learned number per dimension on the MLP's residual (helps to 355M).")
    qkv_norm: bool = key(False, "LayerNorm of q, k and v over all heads: row `+ 3 More LN` of Table 4.")
    bias: bool = key(True, "Biases of the matrices.")
    positions: str = key(
        "sinusoidal",
        "sinusoidal and learned are added to the embedding; rotary turns q and k.",
        choices=("sinusoidal", "learned", "rotary"),
    )
    activation: str = key(
        "gelu", "Of the MLP, which has no gate: exact GELU, or ReLU squared.", choices=("gelu", "relu2")
    )
    norm_eps: float = key(1e-5, "Added to the variance in LayerNorm.", above=0)


@dataclass
class PowerNormConfig(ModelConfig):
    """The baseline's pre-norm decoder with a norm over the batch (PowerNorm paper) in place of RMSNorm."""

    name: str = key("powernorm", "Architecture, chosen with model=NAME.")
    norm: str = key(
        "pn",
        "pn: PowerNorm (Algorithm 2); pn_v: without running statistics (eq. 4-6); batch: BatchNorm; layer: LayerNorm.",
        choices=("pn", "pn_v", "batch", "layer"),
    )
    alpha_fwd: float = key(0.9, "Decay of the running statistics of the forward pass.", above=0, below=1)
    alpha_bkw: float = key(0.9, "Decay of nu, the running statistic of PowerNorm's backward pass.", above=0, below=1)
    psi_warmup_steps: IntOrAuto = key(
        AUTO,
        "Optimizer steps in which pn uses the batch's statistics, not causal; auto is schedule.warmup_steps.",
        choices=(AUTO,),
        minimum=0,
    )
    group_scaling: IntOrAuto = key(
        AUTO,
        "Groups of channels brought to a quadratic mean of 1 before a norm over the batch; auto is n_heads, 0 none.",
        choices=(AUTO,),
        minimum=0,
    )
    statistics: str = key(
        "per_rank",
        "Whether each rank takes statistics of its own rows or all of them together.",
        choices=("per_rank", "synchronised"),
    )
    norm_eps: float = key(1e-5, "Added to the mean square, or the variance, in the norms.", above=0)


@dataclass
class EncoderDecoderKeys:
    """What every encoder-decoder has besides."""

    n_encoder_layers: Union[int, None] = key(
        None, "Number of encoder blocks; null is n_layers, the decoder's.", minimum=1, maximum=100_000
    )
    source_context: Union[int, None] = key(
        None, "Of a row's model.context tokens those that the encoder reads; null is two thirds of them.", minimum=1
    )

    def source_length(self, context: int) -> int:
        """source_context, filled in."""
        return self.source_context or max(1, 2 * context // 3)


@dataclass
class NTransformerConfig(EncoderDecoderKeys, NGPTConfig):
    """Encoder-decoder nGPT (TnT), with cross-attention on the sphere; the options are nGPT's."""

    name: str = key("ntransformer", "Architecture, chosen with model=NAME.")
    alpha_cross: AlphaConfig = field(default_factory=AlphaConfig)


@dataclass
class GPTEncoderDecoderConfig(EncoderDecoderKeys, GPTConfig):
    """Encoder-decoder of the baseline's layers, what the N-Transformer is compared with."""

    name: str = key("gpt_encoder_decoder", "Architecture, chosen with model=NAME.")
