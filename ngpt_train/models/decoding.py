"""The logits of the next token, from a prompt and the tokens generated so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.models.encoder_decoder import EncoderDecoder


@torch.no_grad()
def by_decoder(model: Decoder, prompt: Tensor, new: Tensor) -> Tensor:
    """Logits `(V,)` of the token after prompt `(P,)`, P >= 1, and new `(N,)`; only the last `context` tokens count."""
    return model(torch.cat([prompt, new])[None, -model.config.context :])[0, -1]


@torch.no_grad()
def by_encoder_decoder(model: EncoderDecoder, prompt: Tensor, new: Tensor) -> Tensor:
    """Logits `(V,)` of the token that follows prompt `(P,)`, P >= 1, and new `(N,)`.

    The decoder begins with the last token of the prompt. The source is the tokens before it, at most the last
    `source_context`, padded to that length, because the model takes the first `source_context` tokens of a row for it.
    """
    S, context = model.source_context, model.config.context
    source = prompt[:-1][-S:]
    padding = prompt.new_zeros(S - len(source))
    tokens = torch.cat([prompt[-1:], new])[-(context - S) :]
    row = torch.cat([source, padding, tokens])
    doc_ids = torch.zeros_like(row)
    doc_ids[len(source) : S] = -1
    if not len(source):
        doc_ids[0] = 0  # the source is padding alone: one token of it counts, so that attention has a key
    return model(row[None], doc_ids=doc_ids[None])[0, -1]
