"""GPT, the baseline: pre-norm RMSNorm, RoPE, SwiGLU, untied embeddings, no biases (the Llama layout).

Sections 2.1 to 2.4 of the nGPT paper, left column of Table 1. model.qk_norm adds QK-norm, because a baseline without
it is a weak one. model.mlp=plain takes the gate out of the MLP.
"""

import math

from torch import Tensor, nn

from ngpt_train.kernels.operation import without_kernel
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.layers.attention import Attention, Heads
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import MLP, PlainMLP
from ngpt_train.models.layers.norms import RMSNorm
from ngpt_train.models.layers.rope import Rope, rotate


class GPTBlock(nn.Module):
    """Adds to h the attention and then the MLP of RMSNorm(h)."""

    def __init__(self, config: GPTConfig, causal: bool = True) -> None:
        super().__init__()
        self.norm_attn = RMSNorm(config.d_model, config.norm_eps)
        self.attention = GPTAttention(config, causal)
        self.norm_mlp = RMSNorm(config.d_model, config.norm_eps)
        plain = config.mlp == "plain"
        self.mlp = PlainMLP(config, config.activation) if plain else MLP(config, config.activation)
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, h: Tensor, rope: Rope | None, mask: Mask, seeds: Tensor | None = None) -> Tensor:
        h_A = self.attention(self.norm_attn(h), rope, mask, seeds=seeds)
        h = h + self.drop_attn(h_A, seeds)  # eq. 4
        h_M = self.mlp(self.norm_mlp(h))
        h = h + self.drop_mlp(h_M, seeds)  # eq. 5
        return h  # (B, T, d_model)


class GPTAttention(Attention):
    """softmax(q k^T / sqrt(d_k)) v W_o: eq. 13 and 14; with model.qk_norm, q and k are normalised before."""

    def __init__(self, config: GPTConfig, causal: bool = True) -> None:
        d_head = config.d_model // config.n_heads
        super().__init__(config, softmax_scale=1 / math.sqrt(d_head), causal=causal)
        self.q_norm = RMSNorm(d_head, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(d_head, config.norm_eps) if config.qk_norm else None

    def heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        return super().heads(q, k, v, rope) if self.q_norm is None else self.normed_heads(q, k, v, rope)

    def heads_of_qkv(self, qkv: Tensor, rope: Rope | None) -> Heads:
        if self.q_norm is None:
            return super().heads_of_qkv(qkv, rope)
        return self.normed_heads(*self.split(qkv), rope)

    @without_kernel("rotary", "GPT's model.qk_norm=true")
    def normed_heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        """rope(RMSNorm(q)), rope(RMSNorm(k)) and v, where RMSNorm is over each head."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = (x.unflatten(-1, (-1, self.d_head)) for x in (q, k, v))
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v


class GPT(Decoder):
    """Logits = E_output RMSNorm(h), where h is the output of the last block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, (GPTBlock(config) for _ in range(config.n_layers)))
        self.norm_final = RMSNorm(config.d_model, config.norm_eps)

    def head(self, h: Tensor) -> Head:
        """z = E_output RMSNorm(h): eq. 1, after the final norm of Table 1."""
        return Head(self.norm_final(h), self.unembedding)


Model = GPT  # what build_model builds
