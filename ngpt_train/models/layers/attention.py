"""Causal multi-head attention, with grouped key/value heads. One for all architectures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.schema import ModelConfig
from ngpt_train.models.layers.rope import Rope


class Attention(nn.Module):
    """softmax(scale * q k^T) v W_o, where an architecture says in `queries_and_keys` what q and k are.

    All matrices store points of the model's space as rows: W_q, W_k, W_v as `(heads * d_head, d_model)`
    and W_o as `(heads * d_head, d_model)`, applied from the right.
    """

    def __init__(self, config: ModelConfig, softmax_scale: float) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.d_head = config.d_model // config.n_heads
        self.softmax_scale = softmax_scale
        d_q, d_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.wq = nn.Parameter(torch.empty(d_q, config.d_model))
        self.wk = nn.Parameter(torch.empty(d_kv, config.d_model))
        self.wv = nn.Parameter(torch.empty(d_kv, config.d_model))
        self.wo = nn.Parameter(torch.empty(d_q, config.d_model))

    def queries_and_keys(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """From projections to what is compared: q `(B, T, H, D)`, k `(B, T, H_kv, D)`, same shapes out."""
        raise NotImplementedError(f"{type(self).__name__} must say what its queries and keys are")

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None) -> Tensor:
        """x `(B, T, d_model)` -> `(B, T, d_model)`; mask `(B, 1, T, T)` true where attended, None: causal."""
        B, T, _ = x.shape
        q = F.linear(x, self.wq.to(x.dtype)).view(B, T, self.n_heads, self.d_head)
        k = F.linear(x, self.wk.to(x.dtype)).view(B, T, self.n_kv_heads, self.d_head)
        v = F.linear(x, self.wv.to(x.dtype)).view(B, T, self.n_kv_heads, self.d_head)
        q, k = self.queries_and_keys(q, k, rope)
        y = F.scaled_dot_product_attention(
            q.to(x.dtype).transpose(1, 2),  # (B, H, T, D)
            k.to(x.dtype).transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        return y.transpose(1, 2).reshape(B, T, -1) @ self.wo.to(x.dtype)
