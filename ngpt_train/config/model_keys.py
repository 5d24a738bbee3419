"""The keys of model.* that architectures share. Each has those of its own in ngpt_train/models/NAME/keys.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import AUTO, IntOrAuto, key


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
