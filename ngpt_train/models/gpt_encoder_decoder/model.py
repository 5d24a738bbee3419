"""The baseline of the N-Transformer: an encoder-decoder with the layers of gpt/model.py.

Its decoder has positions and cross-attention (TnT paper, eq. 9). The authors' code has neither.
"""

from torch import Tensor

from ngpt_train.models.decoder import Head
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.gpt.model import GPTBlock
from ngpt_train.models.gpt_encoder_decoder.keys import GPTEncoderDecoderConfig
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.norms import RMSNorm
from ngpt_train.models.layers.rope import Rope


class GPTEncoderDecoder(EncoderDecoder):
    """Logits = E_output RMSNorm(h). The encoder ends with an RMSNorm too."""

    config: GPTEncoderDecoderConfig

    def __init__(self, config: GPTEncoderDecoderConfig) -> None:
        encoder = (GPTBlock(config, causal=False) for _ in range(config.n_encoder_layers or config.n_layers))
        super().__init__(config, encoder, (GPTBlock(config, cross=True) for _ in range(config.n_layers)))
        self.norm_encoder = RMSNorm(config.d_model, config.norm_eps)
        self.norm_final = RMSNorm(config.d_model, config.norm_eps)

    def encode(self, h: Tensor, rope: Rope | None, mask: Mask, valid: Tensor | None) -> Tensor:
        return self.norm_encoder(super().encode(h, rope, mask, valid))

    def head(self, h: Tensor) -> Head:
        return Head(self.norm_final(h), self.unembedding, soft_cap=self.config.logit_soft_cap or 0.0)


Model = GPTEncoderDecoder  # what build_model builds
