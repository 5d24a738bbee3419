"""NormFormer (Shleifer, Weston and Ott 2021): a pre-LayerNorm Transformer with more normalisation inside each layer.

Section 2.1, with ResScale of section 3. Without any of its operations it is the paper's baseline, with GPT-3's layout.
The paper has no equation numbers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.operation import without_kernel
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Attention, Heads
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import PlainMLP
from ngpt_train.models.layers.norms import LayerNorm
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.normformer.keys import NormFormerConfig


class NormFormerBlock(nn.Module):
    """NormFFN(NormScaledMHA(x)) of section 2.1. lambda is ResScale's (section 3); without ResScale it is 1."""

    def __init__(self, config: NormFormerConfig) -> None:
        super().__init__()
        self.norm_attn = LayerNorm(config.d_model, config.norm_eps)
        self.attention = HeadScaleAttention(config)
        self.norm_post_attn = LayerNorm(config.d_model, config.norm_eps) if config.post_attn_norm else nn.Identity()
        self.norm_mlp = LayerNorm(config.d_model, config.norm_eps)
        norm_ffn = LayerNorm(config.d_mlp or 4 * config.d_model, config.norm_eps) if config.ffn_norm else None
        self.mlp = PlainMLP(config, config.activation, config.bias, norm_ffn)  # W_1 is w_u, W_2 is w_down
        self.res_scale = LearnedScale(config.d_model) if config.res_scale else nn.Identity()
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, seeds: Tensor | None = None) -> Tensor:
        # NormScaledMHA(x) = x + LN(HeadScaleMHA(LN(x))), with dropout after the outer LN, as in the authors' code
        normed = self.norm_post_attn(self.attention(self.norm_attn(x), rope, mask, None, seeds))
        x = x + self.drop_attn(normed, seeds)
        # NormFFN(x) = lambda * x + LN(sigma(LN(x) W_1 + b_1)) W_2 + b_2
        x = self.res_scale(x) + self.drop_mlp(self.mlp(self.norm_mlp(x)), seeds)
        return x  # (B, T, d_model)


class HeadScaleAttention(Attention):
    """HeadScaleMHA: Concat(gamma_1 h_1, ..., gamma_n h_n) W_o, where h_i = softmax(q_i k_i^T / sqrt(d_k)) v_i."""

    def __init__(self, config: NormFormerConfig) -> None:
        d_head = config.d_model // config.n_heads
        super().__init__(config, softmax_scale=1 / math.sqrt(d_head), bias=config.bias)
        self.before = config.head_scale == "before"
        self.head_scale = None if config.head_scale == "none" else LearnedScale(config.n_heads)
        widths = [heads * d_head for heads in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
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

    def combine(self, heads: Tensor) -> Tensor:
        """Concat(gamma_i h_i) W_o, as in the paper.

        The authors' code multiplies gamma after W_o, with the output of W_o cut into heads (head_scale=after).
        """
        if self.head_scale is None:
            return super().combine(heads)
        if self.before:
            return super().combine(self.head_scale(heads.mT).mT)  # heads.mT: (B, T, d_head, n_heads)
        y = super().combine(heads).view_as(heads)
        return self.head_scale(y.mT).mT.flatten(2)


class LearnedScale(nn.Module):
    """Learned factors `(size,)` that start at 1: gamma of HeadScale, lambda of ResScale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """gain * x over the last dimension, in x's dtype."""
        return (self.gain * x).to(x.dtype)


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
        self.rotary = config.positions == "rotary"

    def init_std(self, path: str) -> float:
        """As a decoder's, but for the embedding: times sqrt(d_model) it has standard deviation 0.5.

        It is added to sinusoidal positions, which have 0.7, and to normalised outputs of attention, which have 1. The
        authors' code has 1 here. With 1 the embedding, which is the output embedding too, would give the token just
        read so high a logit that the loss starts above ln V.
        """
        return 0.5 / math.sqrt(self.config.d_model) if path == "embedding" else super().init_std(path)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return super().embed(tokens, table) * math.sqrt(self.config.d_model)

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        """sqrt(d_model) E[token] + position (Vaswani et al. 2017, sections 3.4 and 3.5).

        Raises ValueError for a row that is longer than the learned positions.
        """
        T, d_model = h.shape[1:]
        if self.rotary:
            return h
        if self.positions is None:
            return h + sinusoids(T, d_model, h.device).to(h.dtype)[positions]
        if len(self.positions) < T:
            raise ValueError(f"a row of {T} tokens: model.positions=learned knows {len(self.positions)} positions")
        return h + F.embedding(positions, self.positions)

    def rope(self, tokens: Tensor, dtype: torch.dtype) -> Rope | None:
        return super().rope(tokens, dtype) if self.rotary else None

    def head(self, h: Tensor) -> Head:
        return Head(self.norm_final(h), self.unembedding)


def sinusoids(length: int, d_model: int, device: torch.device) -> Tensor:
    """PE `(length, d_model)` in fp64: PE(t, 2i) = sin(t / 10000^(2i/d)), PE(t, 2i + 1) = cos(t / 10000^(2i/d)).

    Vaswani et al. 2017, section 3.5.
    """
    evens = torch.arange(0, d_model, 2, device=device, dtype=torch.float64)
    angles = torch.outer(
        torch.arange(length, device=device, dtype=torch.float64), 10000.0 ** (-evens / d_model)
    )  # (T, d/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :d_model]


Model = NormFormer  # what build_model builds
