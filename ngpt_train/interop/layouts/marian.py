"""A translating composed_encoder_decoder of the first Transformer's form as transformers' MarianMTModel, and back.

Post-norm, sinusoidal positions, and one matrix for the embeddings of source, translation and output. A source ends with
eos, which also begins the translation. Positions are a table among the tensors, ours interleaved. transformers stores
every matrix as (out, in): ours that write to the residual stream are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import NOTE, Layout, check_tensors, differing_key, empty_model, shapes_of
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.layers.positions import sinusoids

# Its form, as keys of model.*.
FORM = {
    "translates": True,
    "norm": "layer",
    "norm_placement": "post",
    "norm_eps": 1e-5,
    "tied_embeddings": True,
    "shared_source": True,
    "mlp": "plain",
    "bias": True,
    "positions": "sinusoidal",
}
# Keys that any form may have: they are sizes, or mean nothing for the trained model.
FREE = {
    *("name", "d_model", "n_layers", "n_encoder_layers", "n_heads", "n_kv_heads", "d_mlp", "vocab_size", "context"),
    *("activation", "scaled_embedding", "source_context", "attn_norm_placement", "mlp_norm_placement"),
    *("init", "init_table", "deep_init", "embedding_gradient", "psi_warmup_steps"),
    *("embedding_dropout", "residual_dropout", "attention_dropout", "activation_dropout"),
}
ATTENTION = {
    **{
        f"{kind}{letter}": f"{letter}_proj.{part}"
        for letter in "qkv"
        for kind, part in (("w", "weight"), ("b", "bias"))
    },
    "wo": "out_proj.weight",
    "bo": "out_proj.bias",
}
OF_BLOCK = {
    **{ours: f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    "norm_post_attn": "self_attn_layer_norm.weight",
    "norm_post_attn.bias": "self_attn_layer_norm.bias",
    "w_u": "fc1.weight",
    "b_u": "fc1.bias",
    "w_down": "fc2.weight",
    "b_down": "fc2.bias",
    "norm_post_mlp": "final_layer_norm.weight",
    "norm_post_mlp.bias": "final_layer_norm.bias",
}
OF_CROSS = {
    **{f"cross.{ours}": f"encoder_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    "norm_post_cross": "encoder_attn_layer_norm.weight",
    "norm_post_cross.bias": "encoder_attn_layer_norm.bias",
}
TRANSPOSED = ("wo", "w_down")
EMBEDDING, BIAS = "model.shared.weight", "final_logits_bias"
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
SIZES = {
    "d_model": "d_model",
    "n_layers": "decoder_layers",
    "n_encoder_layers": "encoder_layers",
    "n_heads": "decoder_attention_heads",
    "d_mlp": "decoder_ffn_dim",
    "vocab_size": "vocab_size",
    "activation": "activation_function",
    "scaled_embedding": "scale_embedding",
    "residual_dropout": "dropout",
    "embedding_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
}


class MarianLayout(Layout):
    """model=composed_encoder_decoder with FORM: MarianMTModel."""

    name = "marian"
    for_transformers = True
    objective = "translation"
    files = ()

    def refusal(self, config: ModelConfig) -> str | None:
        if type(config) is not ComposedEncoderDecoderConfig:
            return f"model.name={config.name}: MarianMTModel is a form of model=composed_encoder_decoder"
        if found := differing_key(config, FORM, FREE):
            return f"{found[0]}: MarianMTModel has {found[1]}"
        if (config.placement_of("attn"), config.placement_of("mlp")) != ("post", "post"):
            return "model.norm_placement: MarianMTModel has post in attention and MLP"
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, ComposedEncoderDecoderConfig)
        d_mlp, n_encoder_layers = config.d_mlp or 4 * config.d_model, config.n_encoder_layers or config.n_layers
        return {
            "architectures": ["MarianMTModel"],
            "model_type": "marian",
            "vocab_size": config.vocab_size,
            "decoder_vocab_size": config.vocab_size,
            "d_model": config.d_model,
            "encoder_layers": n_encoder_layers,
            "decoder_layers": config.n_layers,
            "encoder_attention_heads": config.n_heads,
            "decoder_attention_heads": config.n_heads,
            "encoder_ffn_dim": d_mlp,
            "decoder_ffn_dim": d_mlp,
            "activation_function": config.activation,
            "scale_embedding": config.scaled_embedding,
            "max_position_embeddings": config.context // 2,
            "dropout": config.residual_dropout,
            "attention_dropout": config.attention_dropout,
            "activation_dropout": config.activation_dropout,
            "share_encoder_decoder_embeddings": True,
            "tie_word_embeddings": True,
            "forced_eos_token_id": None,
            "pad_token_id": None,
        }

    def to_foreign(self, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        found = {place: _turned(name, weights[name]) for name, place in names(config).items()}
        embedding = weights["embedding"]
        table = sinusoids(config.context // 2, config.d_model, embedding.device).to(embedding.dtype)
        return {**found, BIAS: torch.zeros_like(embedding[:, :1].T), **{name: table.clone() for name in POSITIONS}}

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if not isinstance(config_json.get(NOTE), dict):
            raise DataError(
                "config.json: model_type=marian: only exports of ours are read; others order positions otherwise, "
                "and have a bias of the logits and a tokenizer for each language"
            )
        keys = {
            **{"name": "composed_encoder_decoder", **FORM, "psi_warmup_steps": 0, "group_scaling": 0},
            **{ours: config_json[theirs] for ours, theirs in SIZES.items()},
            "context": 2 * config_json["max_position_embeddings"],
        }
        config = ComposedEncoderDecoderConfig(**keys)
        shapes, places = shapes_of(empty_model(config, weights)), names(config)
        wanted = {place: shapes[name][:: -1 if _is_turned(name) else 1] for name, place in places.items()}
        wanted |= {BIAS: (1, int(config.vocab_size)), **dict.fromkeys(POSITIONS, (config.context // 2, config.d_model))}
        check_tensors(weights, wanted, "the weights beside config.json")
        return keys, {name: _turned(name, weights[place]) for name, place in places.items()}


def names(config: ModelConfig) -> dict[str, str]:
    """Marian's name for each canonical name."""
    assert isinstance(config, ComposedEncoderDecoderConfig)
    stacks = {
        "encoder": (config.n_encoder_layers or config.n_layers, "encoder", OF_BLOCK),
        "layers": (config.n_layers, "decoder", OF_BLOCK | OF_CROSS),
    }
    return {"embedding": EMBEDDING} | {
        f"{ours}.{i}.{part}": f"model.{theirs}.layers.{i}.{place}"
        for ours, (n, theirs, parts) in stacks.items()
        for i in range(n)
        for part, place in parts.items()
    }


def _is_turned(name: str) -> bool:
    return name.rpartition(".")[2] in TRANSPOSED


def _turned(name: str, weight: Tensor) -> Tensor:
    return (weight.T if _is_turned(name) else weight).contiguous()
