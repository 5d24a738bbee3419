"""A translating composed_encoder_decoder of the first Transformer's form as transformers' MarianMTModel, and back.

Post-norm, sinusoidal positions, and one matrix for the embeddings of source, translation and output. A source ends with
eos, which also begins the translation. Positions are a table among the tensors, ours interleaved.
"""

from typing import Any

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.interop.layouts.form import FREE, FormLayout, with_biases
from ngpt_train.interop.layouts.layout import Json
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.layers.positions import sinusoids

ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}
OF_BLOCK = with_biases(
    {
        **{ours: f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
        "norm_post_attn": "self_attn_layer_norm",
        "w_u": "fc1",
        "w_down": "fc2",
        "norm_post_mlp": "final_layer_norm",
    }
)
OF_CROSS = with_biases(
    {
        **{f"cross.{ours}": f"encoder_attn.{theirs}" for ours, theirs in ATTENTION.items()},
        "norm_post_cross": "encoder_attn_layer_norm",
    }
)
# The form, as keys of model.*.
FORM = {
    **dict.fromkeys(("translates", "tied_embeddings", "shared_source", "bias"), True),
    **{"norm": "layer", "norm_placement": "post", "norm_eps": 1e-5, "mlp": "plain", "positions": "sinusoidal"},
}
# Our key for each key of config.json; then its keys that never change.
SIZES = {
    "vocab_size": "vocab_size",
    "decoder_vocab_size": "vocab_size",
    "d_model": "d_model",
    "encoder_layers": "n_encoder_layers",
    "decoder_layers": "n_layers",
    "encoder_attention_heads": "n_heads",
    "decoder_attention_heads": "n_heads",
    "encoder_ffn_dim": "d_mlp",
    "decoder_ffn_dim": "d_mlp",
    "activation_function": "activation",
    "scale_embedding": "scaled_embedding",
    "dropout": "residual_dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
}
FIXED = {
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "forced_eos_token_id": None,
    "pad_token_id": None,
}


class MarianLayout(FormLayout):
    """model=composed_encoder_decoder: MarianMTModel."""

    name = "marian"
    objective = "translation"
    schema, architecture = ComposedEncoderDecoderConfig, "MarianMTModel"
    form, sizes, fixed = FORM, SIZES, FIXED
    free = FREE | {"activation", "scaled_embedding", "n_encoder_layers", "source_context"}
    others = "order positions otherwise, and have a bias of the logits and a tokenizer for each language"

    def names(self, config: ModelConfig) -> dict[str, str]:
        assert isinstance(config, ComposedEncoderDecoderConfig)
        found = {"embedding": "model.shared.weight"}
        for i in range(config.n_encoder_layers or config.n_layers):
            found |= {f"encoder.{i}.{part}": f"model.encoder.layers.{i}.{at}" for part, at in OF_BLOCK.items()}
        for i in range(config.n_layers):
            parts = OF_BLOCK | OF_CROSS
            found |= {f"layers.{i}.{part}": f"model.decoder.layers.{i}.{at}" for part, at in parts.items()}
        return found

    def constants(self, config: ModelConfig, embedding: Tensor) -> dict[str, Tensor]:
        table = sinusoids(config.context // 2, config.d_model, embedding.device).to(embedding.dtype)
        tables = {f"model.{of}.embed_positions.weight": table.clone() for of in ("encoder", "decoder")}
        return {"final_logits_bias": torch.zeros_like(embedding[:, :1].T), **tables}

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        return super().config_json(config) | {"max_position_embeddings": config.context // 2}

    def model_keys(self, config_json: Json) -> dict[str, Any]:
        halves = {"context": 2 * config_json["max_position_embeddings"]}
        return super().model_keys(config_json) | halves | {"embedding_dropout": config_json["dropout"]}
