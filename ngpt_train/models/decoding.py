"""The scores of the next token, of what was asked and what has been answered so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ngpt_train.models.decoder import Decoder
    from ngpt_train.models.encoder_decoder import EncoderDecoder


@torch.no_grad()
def by_decoder(model: Decoder, prompt: Tensor, new: Tensor) -> Tensor:
    """`(V,)`: scores of the token after prompt `(P,)`, P >= 1, and new `(N,)`; the last `context` tokens count."""
    return model(torch.cat([prompt, new])[None, -model.config.context :])[0, -1]


@torch.no_grad()
def by_encoder_decoder(model: EncoderDecoder, prompt: Tensor, new: Tensor) -> Tensor:
    """As of a decoder. The prompt but for its last token is the source, as in training, where it is always full; the
    decoder begins with that last token."""
    S, context = model.source_context, model.config.context
    source = prompt[:-1][-S:]
    padding = prompt.new_zeros(S - len(source))
    tokens = torch.cat([prompt[-1:], new])[-(context - S) :]
    row = torch.cat([source, padding, tokens])
    doc_ids = torch.zeros_like(row)
    doc_ids[len(source) : S] = -1
    if not len(source):
        doc_ids[0] = 0  # something to attend to: token 0 alone
    return model(row[None], doc_ids=doc_ids[None])[0, -1]
