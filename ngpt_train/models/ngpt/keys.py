"""The keys of model=ngpt."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Union

from ngpt_train.config.keys import AUTO, COUNT, Conflict, FloatOrAuto, key
from ngpt_train.config.model_keys import KINDS, InitConfig, LrFactors, ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.core.constants import Constraint

# The words that `init` and `scale` of a scale vector may be besides a number. auto: model.init_table's for the scale,
# else the paper's.
SCALE_WORDS = (AUTO, "1/L", "0.05*L_ref/L", "0.05*sqrt(L_ref/L)", "1/sqrt(d)", "sqrt(d)", "sqrt(d/d_ref)")
UPDATES = ("lerp", "slerp", "riemannian")
SOFTMAX_SCALES = ("sqrt(d_k)", "1/sqrt(d_k)", "d/sqrt(d_k)")


def starts_of(*vectors: str) -> tuple[str, ...]:
    """The keys of scale vectors for `ModelConfig.starts`."""
    return tuple(f"{vector}.{key}" for vector in vectors for key in ("init", "scale"))


@dataclass
class ScaleVectorConfig:
    """A scale vector of nGPT (section 2.5). Its stored value starts at `scale`; in use it is stored * init / scale."""

    kind: str = key(
        "vector",
        "vector: a number per dimension; scalar: one for all of them; fixed: init, never learned.",
        choices=("vector", "scalar", "fixed"),
    )
    init: FloatOrAuto = key(
        1.0,
        "Value at the start; L is n_layers, d is d_model, L_ref and d_ref come from model.reference.",
        choices=SCALE_WORDS,
        above=0,
    )
    scale: FloatOrAuto = key(
        "1/sqrt(d)",
        "Stored value at the start: the larger, the slower Adam moves the value in use (lr * init / scale a step).",
        choices=SCALE_WORDS,
        above=0,
    )


@dataclass
class QKScaleConfig(ScaleVectorConfig):
    """s_qk, which by default is a vector for each head."""

    shared: bool = key(False, "All heads of a layer share one vector, of d_model / n_heads numbers (engpt).")


@dataclass
class MLPScaleConfig(ScaleVectorConfig):
    """s_u and s_v, which by default are used as they are stored."""

    scale: FloatOrAuto = key(1.0, "Stored value at the start, as above.", choices=SCALE_WORDS, above=0)


@dataclass
class AlphaConfig(ScaleVectorConfig):
    """An eigen learning rate: the share of the way that a block moves h."""

    init: FloatOrAuto = key(0.05, "Value at the start, of the order of 1/L.", choices=SCALE_WORDS, above=0)


@dataclass
class ReferenceSize:
    """Size of the run in which optim.lr was tuned, for the words L_ref and d_ref."""

    d_model: Union[int, None] = key(None, "Its d_model; null is this run's.", **COUNT)
    n_layers: Union[int, None] = key(None, "Its n_layers; null is this run's.", **COUNT)


@dataclass
class ReferenceConfig(ReferenceSize):
    """Size and length of the run in which optim.lr was tuned. nuGPT carries it to others."""

    steps: Union[int, None] = key(None, "Its train.steps; null is this run's.", **COUNT)


# model.lr_rule -> exponents of the width in the rates of the blocks' matrices and of the output embedding, and of the
# depth in the blocks'. The last two are the paper's ablations, inferred from its text (4.4, 4.5 and Lemma 6.9).
EXPONENTS = {"nugpt": (-3 / 4, -3 / 4, 0.0), "completep": (-1.0, -1 / 2, 0.0), "depth_mup": (-3 / 4, -3 / 4, -1 / 2)}


def nugpt_lr_factors(width: float, horizon: float, depth: float = 1.0, rule: str = "nugpt") -> LrFactors:
    """nuGPT's learning rates (arXiv 2604.27077, section 3.1) or an ablation's of its paper, relative to optim.lr.

    width: d_model relative to the reference's; horizon: train.steps and depth: n_layers relative to the reference's.
    nuGPT's rates have no depth, which acts through the initial alpha alone. The half of the output embedding is no part
    of the rule: it is the paper's tuned coefficient (7.4), for its model.
    """
    of_hidden, of_output, of_depth = EXPONENTS[rule]
    every = horizon ** (-1 / 3)
    hidden, output = every * width**of_hidden * depth**of_depth, 0.5 * every * width**of_output
    return LrFactors(embedding=every * width ** (-1 / 2), hidden=hidden, output=output, vector=every)


class ScaledConfig(ModelConfig):
    """What nGPT and anGPT share: scale vectors, whose words are numbers of a size, and rows that never decay."""

    reference: ReferenceSize

    def measured_starts(self, scale: str) -> dict[str, Any]:
        """Rows that start at length 1 are directions: standard deviations of another recipe say nothing there."""
        measured = super().measured_starts(scale)
        return {name: x for name, x in measured.items() if self.rows == "free" or not name.startswith("init.")}

    @property
    def relative_width(self) -> float:
        """m: d_model relative to the reference's."""
        return self.d_model / (self.reference.d_model or self.d_model)

    @property
    def relative_depth(self) -> float:
        return self.n_layers / (self.reference.n_layers or self.n_layers)

    @property
    def reads_reference_depth(self) -> bool:
        return bool({"0.05*L_ref/L", "0.05*sqrt(L_ref/L)"} & self.words())

    def scales(self) -> dict[str, ScaleVectorConfig]:
        return {name: x for name, x in vars(self).items() if isinstance(x, ScaleVectorConfig)}

    def words(self) -> set[float | str]:
        """The inits and scales in use."""
        return {word for x in self.scales().values() for word in (x.init, x.scale)}

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from super().without_effect()
        yield from ((f"{name}.kind", f"{name}.scale") for name, x in self.scales().items() if x.kind == "fixed")
        if not self.reads_reference_depth:
            yield "alpha_mlp.init", "reference.n_layers"

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        yield from super().conflicts(config)
        if config.optim.weight_decay:
            fix = "Set optim.weight_decay=0, or leave the recipe to the model"
            yield "optim.weight_decay model.name", "its weights are never decayed", fix
        step = config.optim.matrix_step
        if self.rows == "ball" and step is not None and step.keeps_norm:
            problem = "rows that may become shorter, and matrices that keep their length, exclude each other"
            yield "optim.name model.name", problem, "Set optim.name=adam, muon or normuon"


@dataclass
class NGPTConfig(ScaledConfig):
    """Normalized Transformer, section 2.6 of the nGPT paper; the options are its ablations."""

    applies_dropout = True

    name: str = key("ngpt", "Architecture, chosen with model=NAME.")
    # Section A.5. On the sphere the projection follows, and only directions count.
    init: InitConfig = field(default_factory=lambda: InitConfig(*["1/sqrt(d_model)"] * 3))
    s_qk: QKScaleConfig = field(default_factory=QKScaleConfig)
    s_u: MLPScaleConfig = field(default_factory=MLPScaleConfig)
    s_v: MLPScaleConfig = field(default_factory=MLPScaleConfig)
    s_z: ScaleVectorConfig = field(default_factory=ScaleVectorConfig)
    alpha_attn: AlphaConfig = field(default_factory=AlphaConfig)
    alpha_mlp: AlphaConfig = field(default_factory=AlphaConfig)
    alpha_sign: str = key(
        "positive", "positive: |alpha| is used (section 2.2); free: alpha as it is (A.2).", choices=("positive", "free")
    )
    qk_norm: bool = key(True, "Norm in eq. 15 and 16; false leaves s_qk alone (Table 6).")
    softmax_scale: str = key(
        "sqrt(d_k)",
        "Factor of q k^T in the softmax: sqrt(d_k) is nGPT's, 1/sqrt(d_k) the baseline's; without qk_norm d/sqrt(d_k) "
        "gives scores the standard deviation 1 at the start. d is d_model, d_k is d_model / n_heads.",
        choices=SOFTMAX_SCALES,
    )
    update: str = key(
        "lerp",
        "How a block moves h: lerp (eq. 10, 11), slerp (eq. 6) or riemannian (eq. 25, 26), each with Norm around it.",
        choices=UPDATES,
    )
    update_attn: Union[str, None] = key(None, "How attention moves h; null is model.update.", choices=UPDATES)
    update_mlp: Union[str, None] = key(None, "How the MLP moves h; null is model.update.", choices=UPDATES)
    norm_eps: float = key(
        0.0,
        "Norm(x) of activations is x / sqrt(|x|^2 + norm_eps), as in engpt; 0: x / max(|x|, 1e-12). Weights have none.",
        minimum=0,
        below=1,
    )
    constraint: str = key(
        "projection",
        "projection: rows return to the sphere after each step; ball: only rows longer than 1 do, as in anGPT; "
        "parametrization: each forward pass normalises free rows; none: rows are free.",
        choices=("projection", "ball", "parametrization", "none"),
    )
    lr_rule: str = key(
        "none",
        "none: every parameter has optim.lr. nugpt: with m = d_model / model.reference.d_model, embeddings have "
        "optim.lr * m^-1/2, the matrices of the blocks m^-3/4, the output embedding half of that, scale vectors 1, and "
        "all of them (train.steps / model.reference.steps)^-1/3 (arXiv 2604.27077; choose it with recipe=nugpt). Its "
        "paper's ablations: completep has m^-1 for the blocks and half of m^-1/2 for the output; depth_mup multiplies "
        "the blocks' by (n_layers / model.reference.n_layers)^-1/2.",
        choices=("none", *EXPONENTS),
    )
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    activation: str = key("silu", "Gate of the MLP; gelu is the exact one.", choices=("silu", "gelu"))
    logit_preconditioning: Union[float, None] = key(
        None,
        "q of logit gradient preconditioning (second-hand): below the logits z = s_z u the gradient is "
        "(s_z / mean(s_z))^q dL/dz in the place of s_z dL/dz; 1 is the paper's. null: the loss's own gradient.",
        minimum=0,
        maximum=10,
    )

    starts = ModelConfig.starts + starts_of("s_qk", "s_u", "s_v", "s_z", "alpha_attn", "alpha_mlp")

    @property
    def rows(self) -> Constraint:
        """Section 2.6, item 2; the ball is anGPT's (arXiv 2505.22014)."""
        found: dict[str, Constraint] = {"projection": "sphere", "ball": "ball"}
        return found.get(self.constraint, "free")

    def lr_factors(self, steps: int) -> LrFactors | None:
        if self.lr_rule == "none":
            return None
        horizon = steps / (self.reference.steps or steps)
        return nugpt_lr_factors(self.relative_width, horizon, self.relative_depth, self.lr_rule)

    @property
    def reads_reference_depth(self) -> bool:
        return self.lr_rule == "depth_mup" or super().reads_reference_depth

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from super().without_effect()
        if self.rows != "free":
            yield from (("constraint", f"init.{kind}") for kind in KINDS)
        if self.lr_rule == "none":
            yield "lr_rule", "reference.steps"
            if "sqrt(d/d_ref)" not in self.words():
                yield "lr_rule", "reference.d_model"
        if self.s_qk.kind != "vector":
            yield "s_qk.kind", "s_qk.shared"
        if all(value for name, value in vars(self).items() if name.startswith("update_")):
            yield "update_mlp", "update"  # each block has a choice of its own

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        yield from super().conflicts(config)
        if self.logit_preconditioning is not None and self.s_z.kind != "vector":
            fix = "Set model.s_z.kind=vector, or model.logit_preconditioning=null"
            yield "model.logit_preconditioning model.s_z.kind", "s_z / mean(s_z) of one number is 1 for every q", fix
        if self.lr_rule == "none":
            return
        if config.optim.lr_rule != "none":
            problem = "nuGPT's rates have no factor of depth, HyperP's have 1 / sqrt(L): the two contradict each other"
            yield "model.lr_rule optim.lr_rule", problem, "Set one of them to none"
        if self.tied_embeddings:
            fix = "Set model.tied_embeddings=false, or model.lr_rule=none"
            yield "model.tied_embeddings model.lr_rule", "one matrix cannot have the rates of two", fix
        if config.optim.matrix_step is not None:
            fix = "Set optim.name=adam, or model.lr_rule=none"
            yield "optim.name model.lr_rule", "the rule's factors are of Adam's steps", fix
        if own := config.optim.groups.chosen():
            fix = f"Set model.lr_rule=none, or leave optim.groups.{own[0]} out"
            yield f"optim.groups.{own[0]} model.lr_rule", "the rule has a rate for each of them", fix

    def not_in_weights(self) -> set[str]:
        return super().not_in_weights() | {"lr_rule", "logit_preconditioning"}
