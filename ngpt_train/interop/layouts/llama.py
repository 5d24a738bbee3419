"""GPT as transformers' LlamaForCausalLM, with QK-norm as its Qwen3ForCausalLM, and back.

Both have GPT's equations, but store two things differently. W_o and W_down are transposed. The pairs of RoPE are
(i, i + d_head/2), so rows of W_q and W_k move if GPT pairs 2i with 2i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.fit import check_tensors, shapes_of
from ngpt_train.interop.layouts.llama_config import NOTE, model_keys
from ngpt_train.models.gpt.keys import GPTConfig

OF_MODEL = {
    "embedding": "model.embed_tokens.weight",
    "norm_final": "model.norm.weight",
    "output": "lm_head.weight",
}
OF_LAYER = {
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "w_v": "mlp.gate_proj.weight",  # the hidden layer is u * act(v)
    "w_u": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "norm_attn": "input_layernorm.weight",
    "norm_mlp": "post_attention_layernorm.weight",
}
TRANSPOSED = ("wo", "w_down")
ROTATED = ("wq", "wk", "q_norm", "k_norm")  # RoPE pairs their rows
INV_FREQ = "rotary_emb.inv_freq"  # a table of RoPE's frequencies in old files; rope_theta gives it too


class LlamaLayout:
    """GPT without QK-norm: LlamaForCausalLM."""

    name = "llama"
    for_transformers = True
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    qk_norm = False

    def refusal(self, config: ModelConfig) -> str | None:
        if type(config) is not GPTConfig:  # a subclass has more, such as an encoder
            return f"model.name={config.name}: {self.architecture} has GPT's equations"
        assert isinstance(config, GPTConfig)
        if config.mlp != "gated":
            return f"model.mlp={config.mlp}: the MLP of {self.architecture} has a gate"
        if config.qk_norm != self.qk_norm:
            a = "a" if self.qk_norm else "no"
            return f"model.qk_norm={str(config.qk_norm).lower()}: {self.architecture} has {a} norm of q and k"
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, GPTConfig)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_mlp or 4 * config.d_model,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads or config.n_heads,
            "head_dim": config.d_model // config.n_heads,
            "hidden_act": config.activation,
            "max_position_embeddings": config.context,
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tied_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
            "rope_theta": config.rope_base,  # for transformers before 5
            **({"use_sliding_window": False, "sliding_window": None} if self.qk_norm else {"mlp_bias": False}),
            NOTE: {"layout": self.name, "rope_layout": config.rope_layout},
        }

    def to_foreign(self, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        return {place: _stored(name, weights[name], config, to_half) for name, place in names(config).items()}

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        keys = model_keys(config_json, self.model_type, self.qk_norm)
        config = GPTConfig(**keys)
        weights = {name: value for name, value in weights.items() if not name.endswith(INV_FREQ)}
        if config.tied_embeddings and OF_MODEL["output"] in weights:
            output = weights.pop(OF_MODEL["output"])
            if not torch.equal(output, weights.get(OF_MODEL["embedding"], output[:0])):
                raise DataError(
                    f"config.json: tie_word_embeddings=true, but {OF_MODEL['output']} is not {OF_MODEL['embedding']}. "
                    "Set tie_word_embeddings to false"
                )
        shapes, places = shapes_of(config, weights), names(config)
        wanted = {
            place: shapes[name][::-1] if name.rpartition(".")[2] in TRANSPOSED else shapes[name]
            for name, place in places.items()
        }
        check_tensors(weights, wanted, "the weights beside config.json")
        return keys, {name: _stored(name, weights[place], config, to_interleaved) for name, place in places.items()}

    def files(self) -> list[Path]:
        return []


class Qwen3Layout(LlamaLayout):
    """GPT with QK-norm: Qwen3ForCausalLM, whose q and k pass an RMSNorm over the head before RoPE, too."""

    name = "qwen3"
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True


def names(config: GPTConfig | ModelConfig) -> dict[str, str]:
    """Llama's name for each canonical name."""
    assert isinstance(config, GPTConfig)
    parts = [part for part in OF_LAYER if config.qk_norm or not part.endswith("_norm")]
    layers = {
        f"layers.{i}.{part}": f"model.layers.{i}.{OF_LAYER[part]}" for i in range(config.n_layers) for part in parts
    }
    first, *rest = OF_MODEL.items()
    return {**dict([first]), **layers, **{a: b for a, b in rest if a != "output" or not config.tied_embeddings}}


def _stored(name: str, weight: Tensor, config: ModelConfig, reorder: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The weight as the other side stores it. reorder: `to_half` for an export, `to_interleaved` for an import."""
    part = name.rpartition(".")[2]
    if part in ROTATED and config.rope_layout == "interleaved":
        return reorder(weight, config.d_model // config.n_heads)
    return (weight.T if part in TRANSPOSED else weight).contiguous()


def to_half(rows: Tensor, d_head: int) -> Tensor:
    """Reorders rows `(heads * d_head, ...)`, in each head from RoPE's pairs (2i, 2i + 1) to (i, i + d_head/2)."""
    return rows.unflatten(0, (-1, d_head // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved(rows: Tensor, d_head: int) -> Tensor:
    """The inverse of `to_half`."""
    return rows.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2)
