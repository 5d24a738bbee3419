"""A bidirectional composed model of RoBERTa's form as transformers' RobertaForMaskedLM, and back.

transformers stores every matrix as (out, in): ours that write to the residual stream are transposed. Its positions
begin after the padding id, so pad_token_id=-1 makes them begin at 0, and no id counts as padding: pad with
attention_mask. The tables of token types, which RoBERTa does not use, have one row of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import NOTE, Layout, check_tensors, differing_key, empty_model, shapes_of
from ngpt_train.models.composed.keys import ComposedConfig

# RoBERTa's form, as keys of model.*.
FORM = {
    "bidirectional": True,
    "norm": "layer",
    "norm_placement": "post",
    "embedding_norm": True,
    "masked_head": True,
    "tied_embeddings": True,
    "mlp": "plain",
    "activation": "gelu",
    "bias": True,
    "positions": "learned",
}
# Keys that any form may have: they are sizes, or mean nothing for the trained model.
FREE = {
    *("name", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "vocab_size", "context", "norm_eps"),
    *("attn_norm_placement", "mlp_norm_placement", "mask_share", "init", "init_table", "deep_init"),
    *("embedding_dropout", "residual_dropout", "attention_dropout", "activation_dropout"),
    *("embedding_gradient", "psi_warmup_steps"),
}
OUTSIDE = {
    "embedding": "roberta.embeddings.word_embeddings.weight",
    "positions": "roberta.embeddings.position_embeddings.weight",
    "norm_embedding": "roberta.embeddings.LayerNorm.weight",
    "norm_embedding.bias": "roberta.embeddings.LayerNorm.bias",
    "masked_head.w_head": "lm_head.dense.weight",
    "masked_head.b_head": "lm_head.dense.bias",
    "masked_head.norm_head": "lm_head.layer_norm.weight",
    "masked_head.norm_head.bias": "lm_head.layer_norm.bias",
    "masked_head.b_output": "lm_head.bias",
}
OF_LAYER = {
    **{
        ours.format(letter): f"attention.self.{name}.{part}"
        for letter, name in (("q", "query"), ("k", "key"), ("v", "value"))
        for ours, part in (("w{}", "weight"), ("b{}", "bias"))
    },
    "wo": "attention.output.dense.weight",
    "bo": "attention.output.dense.bias",
    "norm_post_attn": "attention.output.LayerNorm.weight",
    "norm_post_attn.bias": "attention.output.LayerNorm.bias",
    "w_u": "intermediate.dense.weight",
    "b_u": "intermediate.dense.bias",
    "w_down": "output.dense.weight",
    "b_down": "output.dense.bias",
    "norm_post_mlp": "output.LayerNorm.weight",
    "norm_post_mlp.bias": "output.LayerNorm.bias",
}
TRANSPOSED = ("wo", "w_down")
TYPES = "roberta.embeddings.token_type_embeddings.weight"  # (1, d_model), zeros


class RobertaLayout(Layout):
    """model=composed with FORM: RobertaForMaskedLM."""

    name = "roberta"
    for_transformers = True
    objective = "masked"
    files = ()

    def refusal(self, config: ModelConfig) -> str | None:
        if type(config) is not ComposedConfig:
            return f"model.name={config.name}: RobertaForMaskedLM is a form of model=composed"
        if found := differing_key(config, FORM, FREE):
            return f"{found[0]}: RobertaForMaskedLM has {found[1]}"
        if (config.placement_of("attn"), config.placement_of("mlp")) != ("post", "post"):
            return "model.norm_placement: RobertaForMaskedLM has post in attention and MLP"
        return None

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, ComposedConfig)
        return {
            "architectures": ["RobertaForMaskedLM"],
            "model_type": "roberta",
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_mlp or 4 * config.d_model,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "hidden_act": config.activation,
            "max_position_embeddings": config.context,
            "type_vocab_size": 1,
            "layer_norm_eps": config.norm_eps,
            "hidden_dropout_prob": config.residual_dropout,
            "attention_probs_dropout_prob": config.attention_dropout,
            "tie_word_embeddings": True,
            "pad_token_id": -1,
        }

    def to_foreign(self, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        found = {place: _turned(name, weights[name]) for name, place in names(config).items()}
        return {**found, TYPES: torch.zeros_like(weights["embedding"][:1])}

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if not isinstance(config_json.get(NOTE), dict):
            raise DataError(
                "config.json: model_type=roberta: only exports of ours are read; others have positions from 2 on and "
                "a tokenizer with ids for padding and masks among its own"
            )
        keys = {
            **{
                "name": "composed",
                **FORM,
                "n_layers": config_json["num_hidden_layers"],
                "psi_warmup_steps": 0,
                "group_scaling": 0,
            },
            **{ours: config_json[theirs] for ours, theirs in SIZES.items()},
        }
        config = ComposedConfig(**keys)
        shapes, places = shapes_of(empty_model(config, weights)), names(config)
        wanted = {place: shapes[name][:: -1 if _is_turned(name) else 1] for name, place in places.items()}
        check_tensors(weights, {**wanted, TYPES: (1, config.d_model)}, "the weights beside config.json")
        return keys, {name: _turned(name, weights[place]) for name, place in places.items()}


SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "d_mlp": "intermediate_size",
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "norm_eps": "layer_norm_eps",
    "residual_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}


def names(config: ModelConfig) -> dict[str, str]:
    """RoBERTa's name for each canonical name."""
    return OUTSIDE | {
        f"layers.{i}.{part}": f"roberta.encoder.layer.{i}.{place}"
        for i in range(config.n_layers)
        for part, place in OF_LAYER.items()
    }


def _is_turned(name: str) -> bool:
    return name.rpartition(".")[2] in TRANSPOSED


def _turned(name: str, weight: Tensor) -> Tensor:
    return (weight.T if _is_turned(name) else weight).contiguous()
