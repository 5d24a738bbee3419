"""Multi-head attention, with grouped key/value heads: causal, in both directions, or to another sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.architectures import ModelConfig
from ngpt_train.models.layers.documents import Mask, Packed
from ngpt_train.models.layers.matrix import InUse, as_stored
from ngpt_train.models.layers.rope import Rope, rotate


class Attention(nn.Module):
    """softmax(scale * q k^T) v W_o, where an architecture may say in `queries_and_keys` what q and k are.

    All matrices store points of the model's space as rows: W_q, W_k, W_v as `(heads * d_head, d_model)`
    and W_o as `(heads * d_head, d_model)`, applied from the right.
    """

    def __init__(
        self,
        config: ModelConfig,
        softmax_scale: float,
        causal: bool = True,
        bias: bool = False,
        in_use: InUse = as_stored,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.d_head = config.d_model // config.n_heads
        self.softmax_scale = softmax_scale
        self.in_use = in_use
        d_q, d_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.wq = nn.Parameter(torch.empty(d_q, config.d_model))
        self.wk = nn.Parameter(torch.empty(d_kv, config.d_model))
        self.wv = nn.Parameter(torch.empty(d_kv, config.d_model))
        self.wo = nn.Parameter(torch.empty(d_q, config.d_model))
        self.bq = nn.Parameter(torch.empty(d_q)) if bias else None
        self.bk = nn.Parameter(torch.empty(d_kv)) if bias else None
        self.bv = nn.Parameter(torch.empty(d_kv)) if bias else None
        self.bo = nn.Parameter(torch.empty(config.d_model)) if bias else None

    def reset_parameters(self) -> None:
        for bias in (self.bq, self.bk, self.bv, self.bo):
            if bias is not None:
                nn.init.zeros_(bias)

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `(B, T, H * D)` of x `(B, T, d_model)`, k and v `(B, S, H_kv * D)` of memory `(B, S, d_model)`."""
        return (
            linear(x, self.in_use(self.wq, x.dtype), self.bq),
            linear(memory, self.in_use(self.wk, x.dtype), self.bk),
            linear(memory, self.in_use(self.wv, x.dtype), self.bv),
        )

    def queries_and_keys(self, q: Tensor, k: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """From projections to what is compared: q `(B, T, H, D)`, k `(B, S, H_kv, D)`, same shapes out."""
        return rotate(q, rope), rotate(k, rope)

    def combine(self, heads: Tensor) -> Tensor:
        """Concat(heads) W_o: heads `(B, T, H, D)` -> `(B, T, d_model)`."""
        y = heads.flatten(2) @ self.in_use(self.wo, heads.dtype)
        return y if self.bo is None else y + self.bo.to(y.dtype)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, memory: Tensor | None = None) -> Tensor:
        """x `(B, T, d_model)` -> the same shape, with keys and values from memory `(B, S, d_model)`, if not from x."""
        projections = self.project(x, x if memory is None else memory)
        q, k, v = (heads.unflatten(-1, (-1, self.d_head)) for heads in projections)  # (B, T, H, D)
        q, k = self.queries_and_keys(q, k, rope)
        q, k, v = (heads.to(x.dtype) for heads in (q, k, v))
        return self.combine(attend(q, k, v, self.softmax_scale, self.causal, mask))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Mask) -> Tensor:
    """softmax(scale q k^T) v: q `(B, T, H, D)`, k and v `(B, S, H_kv, D)` -> `(B, T, H, D)`.

    causal: without a mask each query sees the keys up to its own position; a mask says so itself.
    """
    if isinstance(mask, Packed):
        assert causal
        y = mask.attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale)  # (B T, H, D)
        return y.unflatten(0, q.shape[:2])
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # (B, H, T, D)
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b in x's dtype; biases are stored in fp32."""
    return F.linear(x, matrix, None if bias is None else bias.to(x.dtype))
