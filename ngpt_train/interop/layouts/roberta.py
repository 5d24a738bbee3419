"""A bidirectional composed model of RoBERTa's form as transformers' RobertaForMaskedLM, and back.

Its positions begin after the padding id, so pad_token_id=-1 makes them begin at 0, and no id counts as padding: pad
with attention_mask. The tables of token types, which RoBERTa does not use, have one row of zeros.
"""

import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.interop.layouts.form import FREE, FormLayout, with_biases
from ngpt_train.models.composed.keys import ComposedConfig

OUTSIDE = {
    "embedding": "roberta.embeddings.word_embeddings.weight",
    "positions": "roberta.embeddings.position_embeddings.weight",
    **with_biases(
        {
            "norm_embedding": "roberta.embeddings.LayerNorm",
            "masked_head.w_head": "lm_head.dense",
            "masked_head.norm_head": "lm_head.layer_norm",
        }
    ),
    "masked_head.b_output": "lm_head.bias",
}
OF_LAYER = with_biases(
    {
        "wq": "attention.self.query",
        "wk": "attention.self.key",
        "wv": "attention.self.value",
        "wo": "attention.output.dense",
        "norm_post_attn": "attention.output.LayerNorm",
        "w_u": "intermediate.dense",
        "w_down": "output.dense",
        "norm_post_mlp": "output.LayerNorm",
    }
)
# The form, as keys of model.*.
FORM = {
    **dict.fromkeys(("bidirectional", "embedding_norm", "masked_head", "tied_embeddings", "bias"), True),
    **{"norm": "layer", "norm_placement": "post", "mlp": "plain", "activation": "gelu", "positions": "learned"},
}
# Our key for each key of config.json; then its keys that never change.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "d_mlp",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "context",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "residual_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
FIXED = {"hidden_act": "gelu", "type_vocab_size": 1, "tie_word_embeddings": True, "pad_token_id": -1}


class RobertaLayout(FormLayout):
    """model=composed: RobertaForMaskedLM."""

    name = "roberta"
    objective = "masked"
    schema, architecture = ComposedConfig, "RobertaForMaskedLM"
    form, sizes, fixed = FORM, SIZES, FIXED
    free = FREE | {"norm_eps", "mask_share"}
    others = "have positions from 2 on and a tokenizer with ids for padding and masks among its own"

    def names(self, config: ModelConfig) -> dict[str, str]:
        return OUTSIDE | {
            f"layers.{i}.{part}": f"roberta.encoder.layer.{i}.{place}"
            for i in range(config.n_layers)
            for part, place in OF_LAYER.items()
        }

    def constants(self, config: ModelConfig, embedding: Tensor) -> dict[str, Tensor]:
        return {"roberta.embeddings.token_type_embeddings.weight": torch.zeros_like(embedding[:1])}
