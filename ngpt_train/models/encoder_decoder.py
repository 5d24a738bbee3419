"""The skeleton of every encoder-decoder: encoder, decoder with cross-attention to its output, head, loss.

The first `source_context` tokens of a row are the source, which the encoder reads; the others are the decoder's. Of a
model that translates the source is the first half of a row. A doc_id below 0 marks a token as padding, in the source or
after it; no other token attends to padding.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ngpt_train.models.decoder import Decoder, in_matrices
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys
from ngpt_train.models.layers.documents import Mask, boolean_mask
from ngpt_train.models.layers.dropout import number_places, seeded, seeds_of_parts
from ngpt_train.models.layers.rope import Rope


class EncoderDecoder(Decoder):
    """Encoder blocks are called as (h, rope, mask), decoder blocks as (h, rope, mask, memory, memory_mask)."""

    def __init__(self, config: EncoderDecoderKeys, encoder: Iterable[nn.Module], decoder: Iterable[nn.Module]) -> None:
        super().__init__(config, decoder)
        own = None if config.shared_source else nn.Parameter(torch.empty_like(self.embedding))
        self.source_context, self.translates = config.source_length(config.context), config.translates
        self.source_embedding = own
        self.encoder = nn.ModuleList(encoder)
        number_places(self.encoder)

    @property
    def source_table(self) -> Tensor:
        """The encoder's input embedding `(V, d_model)`."""
        return self.embedding if self.source_embedding is None else self.source_embedding

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.layers]

    def residual_writes(self, path: str) -> int:
        """Encoder and decoder have a stream each, and a block of the decoder writes three times."""
        return 2 * len(self.encoder) if path.startswith("encoder.") else 3 * len(self.layers)

    def check_documents(self, doc_ids: Tensor, device: torch.device) -> None:
        """Any number of documents is allowed: doc_ids only mark padding, and attention uses a boolean mask."""

    # An architecture may override these. valid is false for padding, None: there is none.

    def encode(self, h: Tensor, rope: Rope | None, mask: Mask, valid: Tensor | None) -> Tensor:
        """The memory `(B, S, d_model)` that the decoder attends to, from the embedded source h; valid is `(B, S)`."""
        return self.run_blocks(self.encoder, h, rope, mask)

    def decode(
        self, h: Tensor, rope: Rope | None, mask: Mask, memory: Tensor, memory_mask: Mask, valid: Tensor | None
    ) -> Tensor:
        """The decoder's blocks, and what comes before the head: h and result `(B, T, d_model)`, valid `(B, T)`."""
        return self.run_blocks(self.layers, h, rope, mask, memory, memory_mask)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, doc_ids: Tensor | None = None, seeds: Tensor | None = None
    ) -> Tensor | tuple:
        """Logits `(B, T, V)` at the decoder's positions, in at least fp32, or with targets their `Loss`. tokens,
        targets, doc_ids: `(B, S + T)` integers, S = source_context; the first S targets do not count. seeds: as of
        Decoder.forward. Raises ValueError for rows of S tokens or fewer, too."""
        of_source, of_encoder, of_embedding, of_decoder = seeds_of_parts(self.seeds_in_use(seeds), 4)
        S = tokens.shape[1] // 2 if self.translates else self.source_context
        if tokens.shape[1] <= S:
            raise ValueError(f"a row of {tokens.shape[1]} tokens: the first {S} are the source, none is left to decode")
        dtype = self.compute_dtype or self.embedding.dtype
        angles_dtype = torch.promote_types(dtype, torch.float32)
        source, tokens = tokens[:, :S], tokens[:, S:]
        mask = source_mask = valid = source_valid = None
        if doc_ids is not None:
            source_valid, valid = doc_ids[:, :S] >= 0, doc_ids[:, S:] >= 0
            source_mask = source_valid[:, None, None, :]  # (B, 1, 1, S)
            mask = boolean_mask(doc_ids[:, S:])  # (B, 1, T, T)

        source_positions, positions = (torch.arange(part.shape[1], device=part.device) for part in (source, tokens))
        with seeded(of_source):
            h = self.first_hidden_state(source, self.source_table, source_positions)  # (B, S, d_model)
        with seeded(of_encoder):
            memory = self.encode(h, self.rope(source, angles_dtype), source_mask, source_valid)
        with seeded(of_embedding):
            h = self.first_hidden_state(tokens, self.embedding, positions)  # (B, T, d_model)
        with seeded(of_decoder):
            h = self.decode(h, self.rope(tokens, angles_dtype), mask, memory, source_mask, valid)
            if targets is not None and self.config.n_classes:
                return self.loss_at_targets(h, targets[:, S:])
            head = self.head(h)
        return head.logits() if targets is None else self.loss_of(head, targets[:, S:])

    @torch.no_grad()
    def next_token_logits(self, prompt: Tensor, new: Tensor) -> Tensor:
        """The decoder begins with the last token of the prompt. The source is the tokens before it, at most the last
        `source_context`, padded to that length, because `forward` takes the first `source_context` tokens for it."""
        S, context = self.source_context, self.config.context
        source, valid = source_of(prompt, S)
        tokens = torch.cat([prompt[-1:], new])[-(context - S) :]
        doc_ids = torch.cat([valid.long() - 1, torch.zeros_like(tokens)])
        return self(torch.cat([source, tokens])[None], doc_ids=doc_ids[None])[0, -1]

    def flops_per_token(self, context: int, causal: bool = False) -> int:
        """The first S tokens of a row, the source, go through the encoder and through W_k and W_v of the
        cross-attention, the others through all other matrices. causal: half of the decoder's own pairs count."""
        config, S, T = self.config, self.source_context, context - self.source_context
        n_encoder, n_decoder, d_model = len(self.encoder), len(self.layers), config.d_model
        d_kv = (config.n_kv_heads or config.n_heads) * config.d_head
        cross = n_decoder * 2 * d_kv * d_model  # W_k and W_v
        of_source = in_matrices(self.encoder) + cross
        of_target = in_matrices(self.layers) - cross + self.unembedding.numel()
        pairs = n_encoder * S * S + n_decoder * (T * T // (2 if causal else 1) + T * S)
        return (6 * (of_source * S + of_target * T) + 12 * d_model * pairs) // context


def source_of(prompt: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """The tokens before the last one of a prompt `(P,)`, at most S, padded to `(S,)`; and bool `(S,)`, false there."""
    source = prompt[:-1][-S:]
    valid = torch.arange(S, device=prompt.device) < len(source)
    if not len(source):
        valid[0] = True  # the source is padding alone: one token of it counts, so that attention has a key
    return torch.cat([source, prompt.new_zeros(S - len(source))]), valid
