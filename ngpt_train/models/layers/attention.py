"""Multi-head attention, with grouped key/value heads: causal, in both directions, or to another sequence.

`NormedAttention` has norms of q, k and v, and a learned number per head.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.attention import Mask, attention, attention_with_dropout
from ngpt_train.kernels.rotary import QKV, Heads, Rope, rotary
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.linear import FusedLinear, OutputLinear
from ngpt_train.models.layers.norms import LearnedScale

if TYPE_CHECKING:
    from ngpt_train.models.decoding import Cache


class Attention(nn.Module):
    """softmax(softmax_scale q k^T) v W_o: eq. 12 to 14 of nGPT's paper.

    An architecture may override `heads`, which turns the projections of x into the q, k and v of the formula.

    W_q is `(n_heads d_head, d_model)`, W_k and W_v are `(n_kv_heads d_head, d_model)`; the three are one product.
    W_o is `(n_heads d_head, d_model)`, applied from the right. softmax_scale None is 1 / sqrt(d_head).

    In training model.attention_dropout drops probabilities of the softmax.
    """

    def __init__(
        self,
        config: ModelConfig,
        softmax_scale: float | None = None,
        causal: bool = True,
        bias: bool = False,
        unit_rows: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal and not config.bidirectional
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.d_head = config.d_head
        self.softmax_scale = 1 / math.sqrt(self.d_head) if softmax_scale is None else softmax_scale
        self.d_q, self.d_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        rows = {"wq": self.d_q, "wk": self.d_kv, "wv": self.d_kv}
        self.wqkv = FusedLinear(rows, config.d_model, bias, unit_rows)
        self.wo = OutputLinear({"wo": self.d_q}, config.d_model, bias, unit_rows)
        self.dropout = Dropout(config.attention_dropout)
        self.cache: Cache | None = None  # of the tokens before x, only while a text is generated (models/decoding.py)

    def heads(self, qkv: QKV, rope: Rope | None) -> Heads:
        """rope(q), rope(k) and v; without rope the projections themselves."""
        return (qkv.q, qkv.k, qkv.v) if rope is None else rotary(qkv, rope)

    def output(self, heads: Tensor) -> Tensor:
        """Concat(heads) W_o: heads `(B, T, n_heads, d_head)` -> `(B, T, d_model)`."""
        return self.wo(heads.flatten(2))  # eq. 14

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, memory: Tensor | None = None) -> Tensor:
        """x `(B, T, d_model)` -> the same shape. memory `(B, S, d_model)` gives keys and values; without it x does."""
        qkv = self.projections(x) if memory is None else self.projections_of_two(x, memory)  # eq. 12
        q, k, v = (heads.to(x.dtype) for heads in self.heads(qkv, rope))
        if self.cache is not None:
            k, v = self.cache.extend(k, v)
        seeds = self.dropout.seeds()
        if seeds is None:
            heads = attention(q, k, v, self.softmax_scale, self.causal, mask)  # eq. 13
        else:
            heads = attention_with_dropout(q, k, v, self.softmax_scale, self.causal, mask, self.dropout.p, seeds)
        return self.output(heads)

    def projections(self, x: Tensor) -> QKV:
        """W_q x, W_k x and W_v x of x `(B, T, d_model)`, in heads."""
        return QKV.of(self.wqkv(x), self.n_heads, self.n_kv_heads)

    def projections_of_two(self, x: Tensor, memory: Tensor) -> QKV:
        """W_q x, W_k memory and W_v memory of x `(B, T, d_model)` and memory `(B, S, d_model)`, in heads."""
        sizes, bias = [self.d_q, 2 * self.d_kv], self.wqkv.bias
        w_q, w_kv = self.wqkv.weight(x.dtype).split(sizes)
        b_q, b_kv = (None, None) if bias is None else bias.to(x.dtype).split(sizes)
        k, v = F.linear(memory, w_kv, b_kv).chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)) for part in (F.linear(x, w_q, b_q), k, v))
        return QKV(q, k, v)


class NormedAttention(Attention):
    """rope(norm(q)), rope(norm(k)) and v in each head, or with norm(v) too over all heads together; HeadScale's gamma.

    norm: makes a norm of that size. qk_norm: over each head of q and k. qkv_norm: over all heads of q, k and v (row
    `+ 3 More LN` of NormFormer's Table 4). head_scale: HeadScaleMHA of the NormFormer paper, Concat(gamma_1 h_1, ...,
    gamma_n h_n) W_o, where h_i = softmax(q_i k_i^T / sqrt(d_k)) v_i. `before` multiplies gamma before W_o, as in the
    paper. `after` multiplies it after W_o, with the output of W_o cut into heads, as in the authors' code. With `none`
    there is no gamma.
    """

    def __init__(
        self,
        config: ModelConfig,
        norm: Callable[[int], nn.Module],
        causal: bool = True,
        bias: bool = False,
        *,
        qk_norm: bool = False,
        qkv_norm: bool = False,
        head_scale: str = "none",
    ) -> None:
        super().__init__(config, causal=causal, bias=bias)
        self.scale_before = head_scale == "before"
        self.head_scale = None if head_scale == "none" else LearnedScale(config.n_heads)
        sizes = (self.d_q, self.d_kv, self.d_kv)
        self.norm_q, self.norm_k, self.norm_v = (norm(size) if qkv_norm else None for size in sizes)
        self.q_norm, self.k_norm = (norm(self.d_head) if qk_norm else None for _ in range(2))

    def heads(self, qkv: QKV, rope: Rope | None) -> Heads:
        norms = [norm for norm in (self.norm_q, self.norm_k, self.norm_v) if norm is not None]
        if norms:
            parts = zip(norms, (qkv.q, qkv.k, qkv.v), strict=True)
            q, k, v = (norm(part.flatten(2)).view(part.shape) for norm, part in parts)
            qkv = QKV(q, k, v)
        if self.q_norm is not None and self.k_norm is not None:
            qkv = QKV(self.q_norm(qkv.q), self.k_norm(qkv.k), qkv.v)
        return super().heads(qkv, rope)

    def output(self, heads: Tensor) -> Tensor:
        """Concat(gamma_i h_i) W_o: heads `(B, T, n_heads, d_head)` -> `(B, T, d_model)`."""
        if self.head_scale is None:
            return super().output(heads)
        if self.scale_before:
            return super().output(self.head_scale(heads.mT).mT)  # heads.mT: (B, T, d_head, n_heads)
        y = super().output(heads).view_as(heads)
        return self.head_scale(y.mT).mT.flatten(2)
