"""Floating-point operations (FLOPs) per token, of forward and backward, by the usual convention.

6 for each value of a matrix: a multiplication and an addition in the forward pass, and twice as many in the backward
pass. The output embedding counts, the look-up in the input embedding does not. In addition 12 d_model in each layer for
each pair of tokens that attention compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.models.encoder_decoder import EncoderDecoder
    from ngpt_train.models.layers.attention import Attention


def of_decoder(model: Decoder, context: int, causal: bool) -> int:
    """FLOPs per token in rows of T = `context` tokens: 6 x matrices + 12 L d_model T. causal: counts half the pairs,
    those that are not masked."""
    config = model.config
    matrices = in_matrices(model.layers) + model.unembedding.numel()
    attention = 12 * config.n_layers * config.d_model * context
    return 6 * matrices + (attention // 2 if causal else attention)


def of_encoder_decoder(model: EncoderDecoder, context: int, causal: bool) -> int:
    """FLOPs per token in rows of `context` tokens. The first S of them, the source, go through the encoder and through
    W_k and W_v of the cross-attention, the others through all other matrices. causal: counts half the pairs of the
    decoder's self-attention."""
    S, T = model.source_context, context - model.source_context
    n_encoder, n_decoder, d_model = len(model.encoder), len(model.layers), model.config.d_model
    cross = n_decoder * 2 * cast("Attention", model.layers[0].cross).d_kv * d_model  # W_k and W_v
    of_source = in_matrices(model.encoder) + cross
    of_target = in_matrices(model.layers) - cross + model.unembedding.numel()
    pairs = n_encoder * S * S + n_decoder * (T * T // (2 if causal else 1) + T * S)
    return (6 * (of_source * S + of_target * T) + 12 * d_model * pairs) // context


def in_matrices(module: nn.Module) -> int:
    """Number of values in the matrices of a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 2)
