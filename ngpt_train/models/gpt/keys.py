"""The keys of model=gpt."""

from __future__ import annotations

from dataclasses import dataclass

from ngpt_train.config.keys import key
from ngpt_train.config.model_keys import ModelConfig


@dataclass
class GPTConfig(ModelConfig):
    """The baseline, like Llama: RMSNorm, RoPE, SwiGLU, untied embeddings, no biases."""

    applies_dropout = True

    name: str = key("gpt", "Architecture, chosen with model=NAME.")
    norm_eps: float = key(1e-6, "Added to the mean square in RMSNorm.", above=0)
    qk_norm: bool = key(False, "RMSNorm with gain over each head of q and k, before RoPE.")
    activation: str = key("silu", "Gate of the MLP; gelu is the exact one.", choices=("silu", "gelu"))
