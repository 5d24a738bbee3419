"""NormFormer (Shleifer, Weston and Ott 2021): a pre-LayerNorm Transformer with more normalisation inside each layer.

Section 2.1, with ResScale of section 3. Without any of its operations it is the paper's baseline, with GPT-3's layout.
The paper has no equation numbers.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import NormedAttention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import PlainMLP
from ngpt_train.models.layers.norms import LayerNorm, LearnedScale, residual
from ngpt_train.models.layers.positions import add_positions
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.normformer.keys import NormFormerConfig


class NormFormerBlock(nn.Module):
    """NormFFN(NormScaledMHA(x)) of section 2.1. lambda is ResScale's (section 3); without ResScale it is 1."""

    def __init__(self, config: NormFormerConfig) -> None:
        super().__init__()
        norm = partial(LayerNorm, eps=config.norm_eps)
        self.norm_attn = norm(config.d_model)
        self.attention = NormedAttention(
            config, norm, bias=config.bias, qkv_norm=config.qkv_norm, head_scale=config.head_scale
        )
        self.norm_post_attn = norm(config.d_model) if config.post_attn_norm else nn.Identity()
        self.norm_mlp = norm(config.d_model)
        self.mlp = PlainMLP(config, config.activation, config.bias)  # W_1 is w_u, W_2 is w_down
        self.norm_ffn = norm(self.mlp.d_mlp) if config.ffn_norm else nn.Identity()
        self.res_scale = LearnedScale(config.d_model) if config.res_scale else nn.Identity()
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        # NormScaledMHA(x) = x + LN(HeadScaleMHA(LN(x))), with dropout after the outer LN, as in the authors' code
        attend = partial(self.attention, rope=rope, mask=mask)
        x = residual(x, attend, self.drop_attn, norm_in=self.norm_attn, norm_out=self.norm_post_attn)
        # NormFFN(x) = lambda * x + LN(sigma(LN(x) W_1 + b_1)) W_2 + b_2
        ffn = partial(self.mlp, norm_ffn=self.norm_ffn)
        x = residual(x, ffn, self.drop_mlp, norm_in=self.norm_mlp, lambda_=self.res_scale)
        return x  # (B, T, d_model)


class NormFormer(Decoder):
    """Logits = E_output LN(x). Positions are added to the embedding unless they are rotary.

    Matrices are initialised as the baseline's, so that all models of a comparison start alike; the authors' code uses
    Xavier's and Kaiming's rules.
    """

    def __init__(self, config: NormFormerConfig) -> None:
        super().__init__(config, (NormFormerBlock(config) for _ in range(config.n_layers)))
        self.norm_final = LayerNorm(config.d_model, config.norm_eps)
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.context, config.d_model)) if learned else None

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return super().embed(tokens, table) * math.sqrt(self.config.d_model)

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        """sqrt(d_model) E[token] + position (Vaswani et al. 2017, sections 3.4 and 3.5)."""
        return h if self.config.uses_rope else add_positions(h, positions, self.positions)

    def head(self, h: Tensor) -> Head:
        return Head(self.norm_final(h), self.unembedding)


Model = NormFormer  # what build_model builds
