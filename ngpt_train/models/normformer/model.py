"""NormFormer (Shleifer, Weston and Ott 2021): a pre-LayerNorm Transformer with more normalisation inside each layer.

Section 2.1, with ResScale of section 3. Without any of its operations it is the paper's baseline, with GPT-3's layout.
The paper has no equation numbers.
"""

import math

from torch import Tensor, nn

from ngpt_train.kernels.operation import without_kernel
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Heads
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.learned_scale import HeadScaleAttention, LearnedScale
from ngpt_train.models.layers.mlp import PlainMLP
from ngpt_train.models.layers.norms import LayerNorm
from ngpt_train.models.layers.positions import add_positions, learned_positions
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.normformer.keys import NormFormerConfig


class NormFormerBlock(nn.Module):
    """NormFFN(NormScaledMHA(x)) of section 2.1. lambda is ResScale's (section 3); without ResScale it is 1."""

    def __init__(self, config: NormFormerConfig) -> None:
        super().__init__()
        self.norm_attn = LayerNorm(config.d_model, config.norm_eps)
        self.attention = NormFormerAttention(config)
        self.norm_post_attn = LayerNorm(config.d_model, config.norm_eps) if config.post_attn_norm else nn.Identity()
        self.norm_mlp = LayerNorm(config.d_model, config.norm_eps)
        norm_ffn = LayerNorm(config.d_mlp or 4 * config.d_model, config.norm_eps) if config.ffn_norm else None
        self.mlp = PlainMLP(config, config.activation, config.bias, norm_ffn)  # W_1 is w_u, W_2 is w_down
        self.res_scale = LearnedScale(config.d_model) if config.res_scale else nn.Identity()
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, seeds: Tensor | None = None) -> Tensor:
        # NormScaledMHA(x) = x + LN(HeadScaleMHA(LN(x))), with dropout after the outer LN, as in the authors' code
        normed = self.norm_post_attn(self.attention(self.norm_attn(x), rope, mask, seeds=seeds))
        x = x + self.drop_attn(normed, seeds)
        # NormFFN(x) = lambda * x + LN(sigma(LN(x) W_1 + b_1)) W_2 + b_2
        x = self.res_scale(x) + self.drop_mlp(self.mlp(self.norm_mlp(x)), seeds)
        return x  # (B, T, d_model)


class NormFormerAttention(HeadScaleAttention):
    """HeadScaleMHA, with the norms of row `+ 3 More LN` of Table 4 as an option."""

    def __init__(self, config: NormFormerConfig) -> None:
        super().__init__(config, config.head_scale, bias=config.bias)
        widths = (self.d_q, self.d_kv, self.d_kv)
        norms = [LayerNorm(width, config.norm_eps) if config.qkv_norm else None for width in widths]
        self.norm_q, self.norm_k, self.norm_v = norms

    def heads_of_qkv(self, qkv: Tensor, rope: Rope | None) -> Heads:
        if self.norm_q is None:
            return super().heads_of_qkv(qkv, rope)
        return self.normed_heads(*self.split(qkv), rope)

    @without_kernel("rotary", lambda *arguments: None if arguments[-1] is None else "model.qkv_norm=true")
    def normed_heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        """The heads of LN(q), LN(k) and LN(v): row `+ 3 More LN` of Table 4."""
        assert self.norm_q is not None
        assert self.norm_k is not None
        assert self.norm_v is not None
        return self.heads(self.norm_q(q), self.norm_k(k), self.norm_v(v), rope)


class NormFormer(Decoder):
    """Logits = E_output LN(x). Positions are added to the embedding unless they are rotary.

    Matrices are initialised as the baseline's, so that all models of a comparison start alike; the authors' code uses
    Xavier's and Kaiming's rules.
    """

    def __init__(self, config: NormFormerConfig) -> None:
        super().__init__(config, (NormFormerBlock(config) for _ in range(config.n_layers)))
        self.norm_final = LayerNorm(config.d_model, config.norm_eps)
        self.positions = learned_positions(config)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return super().embed(tokens, table) * math.sqrt(self.config.d_model)

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        """sqrt(d_model) E[token] + position (Vaswani et al. 2017, sections 3.4 and 3.5)."""
        return h if self.config.uses_rope else add_positions(h, positions, self.positions)

    def head(self, h: Tensor) -> Head:
        return Head(self.norm_final(h), self.unembedding)


Model = NormFormer  # what build_model builds
