"""GPT, the baseline: pre-norm RMSNorm, RoPE, SwiGLU, untied embeddings, no biases (the Llama layout).

Sections 2.1 to 2.4 of the nGPT paper, left column of Table 1. model.qk_norm adds QK-norm, because a baseline without
it is a weak one. model.mlp=plain takes the gate out of the MLP.
"""

from functools import partial

from torch import Tensor, nn

from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.layers.attention import NormedAttention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import MLPS
from ngpt_train.models.layers.norms import RMSNorm, residual
from ngpt_train.models.layers.rope import Rope


class GPTBlock(nn.Module):
    """Adds to h the attention and then the MLP of RMSNorm(h). cross: between them attention to the encoder's output, as
    in the decoder of gpt_encoder_decoder."""

    def __init__(self, config: GPTConfig, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        norm = partial(RMSNorm, eps=config.norm_eps)
        self.norm_attn = norm(config.d_model)
        self.attention = NormedAttention(config, norm, causal, qk_norm=config.qk_norm)
        self.norm_mlp = norm(config.d_model)
        self.mlp = MLPS[config.mlp](config, config.activation)
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)
        self.norm_cross = norm(config.d_model) if cross else None
        self.cross = NormedAttention(config, norm, causal=False, qk_norm=config.qk_norm) if cross else None
        self.drop_cross = Dropout(config.residual_dropout) if cross else None

    def forward(
        self, h: Tensor, rope: Rope | None, mask: Mask, memory: Tensor | None = None, memory_mask: Mask = None
    ) -> Tensor:
        h = residual(h, lambda x: self.attention(x, rope, mask), self.drop_attn, norm_in=self.norm_attn)  # eq. 4
        if self.cross and self.norm_cross and self.drop_cross:  # TnT paper, Table 1 and eq. 9
            attend = partial(self.cross, rope=None, mask=memory_mask, memory=memory)
            h = residual(h, attend, self.drop_cross, norm_in=self.norm_cross)
        h = residual(h, self.mlp, self.drop_mlp, norm_in=self.norm_mlp)  # eq. 5
        return h  # (B, T, d_model)


class GPT(Decoder):
    """Logits = E_output RMSNorm(h), where h is the output of the last block."""

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, (GPTBlock(config) for _ in range(config.n_layers)))
        self.norm_final = RMSNorm(config.d_model, config.norm_eps)

    def head(self, h: Tensor) -> Head:
        """z = E_output RMSNorm(h): eq. 1, after the final norm of Table 1."""
        return Head(self.norm_final(h), self.unembedding, soft_cap=self.config.logit_soft_cap or 0.0)


Model = GPT  # what build_model builds
