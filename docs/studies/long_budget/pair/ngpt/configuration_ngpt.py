"""The configuration of nGPT for transformers: config.json as `export` of ngpt-train writes it.

This file stands alone. It is copied beside config.json, and transformers reads it with trust_remote_code=True.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

if TYPE_CHECKING:
    # Never runs. transformers reads it as text and names the class below by a hash of this file and that one. Without
    # it, an export with another modeling file, in the same process, would get the code of the first.
    from .modeling_ngpt import NGPTForCausalLM  # noqa: F401

# What the words of config.json may be.
CHOICES = {
    "rope_layout": ("half", "interleaved"),
    "alpha_sign": ("positive", "free"),
    "softmax_scale": ("sqrt(d_k)", "1/sqrt(d_k)", "d/sqrt(d_k)"),
    "sphere_update": ("lerp", "slerp", "riemannian"),
    "update_attn": ("lerp", "slerp", "riemannian", None),
    "update_mlp": ("lerp", "slerp", "riemannian", None),
    "constraint": ("projection", "ball", "parametrization", "none"),
    "hidden_act": ("silu", "gelu"),
}
# Scale vectors of section 2.5: `kind` is vector, scalar or fixed; a learned one is stored * init / scale in use.
SCALES: dict[str, dict[str, Any]] = {
    "alpha_attn": {"kind": "vector", "init": 0.05, "scale": "1/sqrt(d)"},
    "alpha_mlp": {"kind": "vector", "init": 0.05, "scale": "1/sqrt(d)"},
    "s_qk": {"kind": "vector", "init": 1.0, "scale": "1/sqrt(d)", "shared": False},
    "s_u": {"kind": "vector", "init": 1.0, "scale": 1.0},
    "s_v": {"kind": "vector", "init": 1.0, "scale": 1.0},
    "s_z": {"kind": "vector", "init": 1.0, "scale": "1/sqrt(d)"},
}


class NGPTConfig(PreTrainedConfig):
    """Widths have transformers' names, the options of nGPT those of ngpt-train, where its manual explains them.

    Raises ValueError for a word that an option does not take, and for widths that do not fit each other.
    """

    model_type: ClassVar[str] = "ngpt_train_ngpt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024  # d_model
    intermediate_size: int = 0  # d_mlp; 0: 4 d_model
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 0  # 0: as many as num_attention_heads
    max_position_embeddings: int = 1024  # tokens in a row of training
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    rope_base: float = 10000.0
    rope_layout: str = "half"
    # What is not given is the paper's, as in SCALES.
    alpha_attn: dict[str, Any] = field(default_factory=dict)
    alpha_mlp: dict[str, Any] = field(default_factory=dict)
    s_qk: dict[str, Any] = field(default_factory=dict)
    s_u: dict[str, Any] = field(default_factory=dict)
    s_v: dict[str, Any] = field(default_factory=dict)
    s_z: dict[str, Any] = field(default_factory=dict)
    alpha_sign: str = "positive"
    qk_norm: bool = True
    softmax_scale: str = "sqrt(d_k)"
    sphere_update: str = "lerp"  # model.update; PreTrainedConfig has a method of that name
    update_attn: str | None = None  # None: sphere_update
    update_mlp: str | None = None
    norm_eps: float = 0.0
    constraint: str = "projection"
    hidden_act: str = "silu"
    # d_model and n_layers of the run that the words L_ref and d_ref stand for; None: this model's own.
    reference: dict[str, int | None] = field(default_factory=dict)

    def __post_init__(self, **kwargs: Any) -> None:
        for name, paper in SCALES.items():
            setattr(self, name, paper | getattr(self, name))
        self.reference = {name: self.reference.get(name) for name in ("d_model", "n_layers")}
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self._check()
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(str, choices))
                raise ValueError(f"config.json: {name}={getattr(self, name)!r} must be one of {allowed}")
        for name in SCALES:
            if getattr(self, name)["kind"] not in ("vector", "scalar", "fixed"):
                kind = getattr(self, name)["kind"]
                raise ValueError(f"config.json: kind={kind!r} of {name} must be vector, scalar or fixed")
        if self.hidden_size % (2 * self.num_attention_heads):
            sizes = f"hidden_size={self.hidden_size} and num_attention_heads={self.num_attention_heads}"
            raise ValueError(f"config.json: {sizes} do not give heads of an even width")
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"num_key_value_heads={self.num_key_value_heads}"
            raise ValueError(f"config.json: {heads} must divide num_attention_heads={self.num_attention_heads}")

    def value_of(self, value: float | str) -> float:
        """`init` or `scale` of a scale vector: a number, or a word for one that depends on the size of the model."""
        d, L = self.hidden_size, self.num_hidden_layers
        words = {
            "1/L": 1 / L,
            "0.05*L_ref/L": 0.05 / (L / (self.reference["n_layers"] or L)),
            "0.05*sqrt(L_ref/L)": 0.05 / math.sqrt(L / (self.reference["n_layers"] or L)),
            "1/sqrt(d)": 1 / math.sqrt(d),
            "sqrt(d)": math.sqrt(d),
            "sqrt(d/d_ref)": math.sqrt(d / (self.reference["d_model"] or d)),
        }
        return words[value] if isinstance(value, str) else float(value)
