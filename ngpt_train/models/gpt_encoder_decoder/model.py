"""The baseline of the N-Transformer: an encoder-decoder with the layers of gpt/model.py.

Its decoder has positions and cross-attention (TnT paper, eq. 9); that of the authors' code has neither.
"""

from torch import Tensor

from ngpt_train.models.decoder import Head
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.gpt.model import GPTAttention, GPTBlock
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.norms import RMSNorm
from ngpt_train.models.layers.rope import Rope


class GPTDecoderBlock(GPTBlock):
    """The decoder's three sublayers: Table 1 of the TnT paper, left column."""

    def __init__(self, config: GPTEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.norm_cross = RMSNorm(config.d_model, config.norm_eps)
        self.cross = GPTAttention(config, causal=False)
        self.drop_cross = Dropout(config.residual_dropout)

    def forward(  # type: ignore[override]
        self,
        h: Tensor,
        rope: Rope | None,
        mask: Tensor | None,
        memory: Tensor,
        memory_mask: Tensor | None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        h_A = self.attention(self.norm_attn(h), rope, mask, seeds=seeds)
        h = h + self.drop_attn(h_A, seeds)  # Table 1
        h_C = self.cross(self.norm_cross(h), None, memory_mask, memory, seeds)
        h = h + self.drop_cross(h_C, seeds)  # Table 1, eq. 9
        h_M = self.mlp(self.norm_mlp(h))
        h = h + self.drop_mlp(h_M, seeds)  # Table 1
        return h  # (B, T, d_model)


class GPTEncoderDecoder(EncoderDecoder):
    """Logits = E_output RMSNorm(h). The encoder ends with an RMSNorm too."""

    def __init__(self, config: GPTEncoderDecoderConfig) -> None:
        encoder = (GPTBlock(config, causal=False) for _ in range(config.n_encoder_layers or config.n_layers))
        super().__init__(config, encoder, (GPTDecoderBlock(config) for _ in range(config.n_layers)))
        self.norm_encoder = RMSNorm(config.d_model, config.norm_eps)
        self.norm_final = RMSNorm(config.d_model, config.norm_eps)

    def encode(
        self, h: Tensor, rope: Rope | None, mask: Mask, valid: Tensor | None, seeds: Tensor | None = None
    ) -> Tensor:
        return self.norm_encoder(super().encode(h, rope, mask, valid, seeds))

    def head(self, h: Tensor) -> Head:
        return Head(self.norm_final(h), self.unembedding)


Model = GPTEncoderDecoder  # what build_model builds
