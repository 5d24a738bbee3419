"""The keys of model=composed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Union

from ngpt_train.config.keys import AUTO, Conflict, key, nearest_multiples
from ngpt_train.config.model_keys import InitConfig
from ngpt_train.config.schema import Config
from ngpt_train.models.normformer.keys import PositionKeys
from ngpt_train.models.powernorm.keys import OVER_BATCH, PowerNormConfig

NORMS = ("rms", "layer", "layer_no_bias", "layer_no_gain", "layer_plain", "cogview", "dyt", "derf", *OVER_BATCH)
PLACEMENTS = ("pre", "post", "peri", "reordered")
SUBLAYERS = ("none", "mlp", "attn", "both")


@dataclass
class ComposedConfig(PositionKeys, PowerNormConfig):
    """A decoder with options for the norm, its places and the other parts of a block. The defaults are GPT's.

    The keys of norms over the batch are PowerNorm's.
    """

    name: str = key("composed", "Architecture, chosen with model=NAME.")
    init: InitConfig = field(default_factory=lambda: InitConfig(embedding=AUTO))
    norm: str = key(
        "rms",
        "rms: RMSNorm, which is T5's LayerNorm; layer: LayerNorm, also without its bias, its gain or both "
        "(layer_plain); cogview: LN(x / max|x|); dyt: tanh(alpha x); derf: erf(alpha x + s); pn, pn_v, batch: as "
        "of model=powernorm.",
        choices=NORMS,
    )
    dyt_alpha: float = key(0.5, "Initial value of DyT's and Derf's alpha, which is learned.", above=0)
    norm_placement: str = key(
        "pre",
        "Of a sublayer f: pre is x + f(norm(x)); post norm(x + f(x)), without a norm at the end of the model; peri "
        "(sandwich) x + norm(f(norm(x))); reordered x + norm(f(x)).",
        choices=PLACEMENTS,
    )
    attn_norm_placement: Union[str, None] = key(
        None, "As norm_placement, for attention alone; null is norm_placement.", choices=PLACEMENTS
    )
    mlp_norm_placement: Union[str, None] = key(
        None, "As norm_placement, for the MLP alone; null is norm_placement.", choices=PLACEMENTS
    )
    separate_gains: bool = key(
        False,
        "The gain of the norm before a sublayer is one for each matrix that reads it: W_q, W_k, W_v, W_u and W_v of "
        "the MLP (arXiv 2605.26895, second-hand: heterogeneous gains). With model.norm=rms.",
    )
    input_gain_decay: bool = key(
        False,
        "optim.weight_decay applies to gains that stand before a matrix too, not to gains after one (arXiv 2605.26895, "
        "second-hand: input weight decay).",
    )
    ffn_norm: str = key(
        "none",
        "Between the MLP's hidden state and W_down: the norm (NormFormer), or a learned gain alone.",
        choices=("none", "norm", "gain"),
    )
    qk_norm: bool = key(False, "The norm, over each head of q and k, before RoPE.")
    qkv_norm: bool = key(False, "The norm, over all heads of q, k and v together, before RoPE.")
    head_scale: str = key(
        "none", "NormFormer's learned number per head, before W_O or after it.", choices=("none", "before", "after")
    )
    res_scale: str = key(
        "none",
        "ResScale: a learned number per dimension, 1 at first, on the residual of these sublayers (NormFormer: mlp).",
        choices=SUBLAYERS,
    )
    layer_scale: Union[float, None] = key(
        None,
        "LayerScale: a learned number per dimension on what each sublayer adds, which starts here (1e-5); null: none.",
        above=0,
    )
    mlp: str = key("gated", "gated: act(W_v x) * W_u x; plain: act(W_u x).", choices=("gated", "plain"))
    activation: str = key(
        "silu", "Of the MLP; gelu is exact. A gated MLP has silu or gelu.", choices=("silu", "gelu", "relu", "relu2")
    )
    activation_dropout: float = key(
        0.0, "Probability that training drops a value of the MLP's hidden state, before ffn_norm.", minimum=0, below=1
    )
    bias: bool = key(False, "Biases of the matrices.")
    positions: str = key(
        "rotary",
        "rotary turns q and k; sinusoidal and learned are added to the embedding; none: no positions.",
        choices=("rotary", "sinusoidal", "learned", "none"),
    )
    scaled_embedding: bool = key(
        False, "Multiplies the embedding by sqrt(d_model) where it is read, as the first Transformer and NormFormer."
    )
    embedding_gradient: float = key(
        1.0, "Factor on the gradient that the embedding gets where it is read (CogView: 0.1).", above=0, maximum=1
    )
    embedding_norm: bool = key(
        False, "The norm, on the sum of embedding and positions (BERT, BLOOM), before the embedding's dropout."
    )
    masked_head: bool = key(
        False, "BERT's head, of a bidirectional model: logits = E_output norm(gelu(W_head x + b_head)) + b_output."
    )
    deep_init: bool = key(False, "DeepInit: matrices of block l start smaller by the factor 1 / sqrt(l), l = 1, 2, ...")

    @property
    def uses_dropout(self) -> bool:
        return super().uses_dropout or self.activation_dropout > 0

    def placement_of(self, sublayer: str) -> str:
        """The placement of `attn` or `mlp`."""
        own = self.attn_norm_placement if sublayer == "attn" else self.mlp_norm_placement
        return own or self.norm_placement

    def measured_starts(self, scale: str) -> dict[str, Any]:
        """With scaled_embedding, the start that was measured for NormFormer's embedding."""
        measured = super().measured_starts(scale)
        if self.scaled_embedding and "init.embedding" in measured:
            measured["init.embedding"] = "1/sqrt(d_model)"
        return measured

    def paper_start(self, name: str) -> float | str:
        """With scaled_embedding the embedding starts as NormFormer's, see there; all else starts as GPT's."""
        if name == "init.embedding":
            return "0.5/sqrt(d_model)" if self.scaled_embedding else 0.02
        return super().paper_start(name)

    def resolve(self, config: Config) -> None:
        super().resolve(config)
        self.attn_norm_placement = self.placement_of("attn")
        self.mlp_norm_placement = self.placement_of("mlp")

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from super().without_effect()
        if not (self.norm_over_batch or self.norm == "layer"):
            yield "norm", "group_scaling"
        yield "norm", "norm_eps" if self.norm in ("dyt", "derf") else "dyt_alpha"
        if self.norm in ("layer_no_gain", "layer_plain") and self.ffn_norm != "gain":
            yield "norm", "input_gain_decay"
        elif {self.placement_of("attn"), self.placement_of("mlp")} == {"post"} and self.ffn_norm == "none":
            yield "norm_placement", "input_gain_decay"
        if self.norm_placement not in (self.placement_of("attn"), self.placement_of("mlp")):
            yield "mlp_norm_placement", "norm_placement"  # attention has a placement of its own too

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        yield from super().conflicts(config)
        if self.mlp == "gated" and self.activation not in ("silu", "gelu"):
            fix = "Set model.mlp=plain, or model.activation=silu or gelu"
            yield "model.activation model.mlp", "a gated MLP has no such gate", fix
        if self.qk_norm and self.qkv_norm:
            yield "model.qk_norm model.qkv_norm", "both normalise q and k", "Set one of them to false"
        if self.masked_head and not self.bidirectional:
            fix = "Choose objective=masked, or set model.masked_head=false"
            yield "model.masked_head model.bidirectional", "it is a head for masks", fix
        for name in ("masked_head", "embedding_norm"):
            if getattr(self, name) and self.norm_over_batch:
                problem = "this norm takes statistics of the batch, and stands in blocks and at their end alone"
                yield f"model.{name} model.norm", problem, f"Set model.{name}=false, or choose another norm"
        if self.separate_gains and self.norm != "rms":
            yield "model.separate_gains model.norm", "only RMSNorm's gain is separated", "Set model.norm=rms"
        outside = {self.placement_of(sublayer) for sublayer in ("attn", "mlp")} - {"pre", "peri"}
        if self.separate_gains and outside:
            problem = f"with {min(outside)} there is no norm before the sublayer"
            yield "model.separate_gains model.norm_placement", problem, "Set both placements to pre or peri"
        if self.input_gain_decay and not config.optim.weight_decay:
            fix = "Set optim.weight_decay above 0, or model.input_gain_decay=false"
            yield "model.input_gain_decay optim.weight_decay", "nothing decays", fix
        for name in ("qk_norm", "qkv_norm"):
            if getattr(self, name) and self.norm_over_batch:
                problem = "q, k and v are normalised per token, this norm takes statistics of the batch"
                yield f"model.{name} model.norm", problem, f"Set model.{name}=false, or choose another norm"
            elif getattr(self, name) and self.group_scaling:
                problem = "layer-scale stands before the norms of h, q and k have none"
                yield f"model.{name} model.group_scaling", problem, "Set one of them to false or 0"
        if config.optim.matrix_step is not None and config.optim.matrix_step.keeps_norm:
            fix = "Set optim.name=adamw or muon, or choose a norm with a gain before each sublayer"
            if self.norm in ("layer_no_gain", "layer_plain"):
                yield "optim.name model.norm", "matrices keep their lengths, and no gain makes up for one", fix
            elif "reordered" in (self.placement_of("attn"), self.placement_of("mlp")):
                problem = "matrices keep their lengths, and no gain stands before them to make up for one"
                yield "optim.name model.norm_placement", problem, fix
        groups, d_mlp = int(self.group_scaling), int(self.d_mlp or 4 * self.d_model)
        if self.ffn_norm == "norm" and groups and d_mlp % groups:
            fix = nearest_multiples("model.d_mlp", d_mlp, groups)
            yield "model.group_scaling model.d_mlp", "the groups do not divide the MLP's hidden width", fix

    def kept_beyond_gpt(self) -> int:
        """A norm after a sublayer, LayerScale and x / max|x| keep values of x's width, a norm of the MLP's hidden state
        values of the hidden width, its dropout these and a bool for each, which counts as one more."""
        peri = [self.placement_of(f) for f in ("attn", "mlp")].count("peri")
        wide = 2 * peri + 2 * (self.layer_scale is not None) + 2 * (2 + peri) * (self.norm == "cogview")
        return (
            super().kept_beyond_gpt()
            + wide * self.d_model
            + ((self.ffn_norm != "none") + 2 * (self.activation_dropout > 0)) * (self.d_mlp or 4 * self.d_model)
        )

    def not_in_weights(self) -> set[str]:
        further = {"dyt_alpha", "embedding_gradient", "deep_init", "input_gain_decay", "activation_dropout"}
        return super().not_in_weights() | further
