"""Multi-head attention, with grouped key/value heads: causal, in both directions, or to another sequence."""

import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.attention import Mask, attention, attention_with_dropout
from ngpt_train.kernels.rotary import Heads, RotaryOptions, rotary
from ngpt_train.models.layers.cache import Cache
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.linear import FusedLinear, OutputLinear
from ngpt_train.models.layers.rope import Rope, rotate


class Attention(nn.Module):
    """softmax(softmax_scale q k^T) v W_o: eq. 12 to 14 of nGPT's paper.

    An architecture may override `heads`, which turns the projections of x into the q, k and v of the formula.

    W_q is `(n_heads d_head, d_model)`, W_k and W_v are `(n_kv_heads d_head, d_model)`; the three are one product.
    W_o is `(n_heads d_head, d_model)`, applied from the right.

    In training model.attention_dropout drops probabilities of the softmax.
    """

    def __init__(
        self,
        config: ModelConfig,
        softmax_scale: float,
        causal: bool = True,
        bias: bool = False,
        unit_rows: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.d_head = config.d_model // config.n_heads
        self.softmax_scale = softmax_scale
        self.d_q, self.d_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        rows = {"wq": self.d_q, "wk": self.d_kv, "wv": self.d_kv}
        self.wqkv = FusedLinear(rows, config.d_model, bias, unit_rows)
        self.wo = OutputLinear({"wo": self.d_q}, config.d_model, bias, unit_rows)
        self.dropout = Dropout(config.attention_dropout)
        self.cache: Cache | None = None  # of the tokens before x, only while a text is generated (models/decoding.py)

    def heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        """rope(q), rope(k) and v in heads: projections `(B, T, d_q)`, `(B, S, d_kv)`, `(B, S, d_kv)` -> `Heads`."""
        q, k, v = (x.unflatten(-1, (-1, self.d_head)) for x in (q, k, v))
        return rotate(q, rope), rotate(k, rope), v

    def heads_of_qkv(self, qkv: Tensor, rope: Rope | None) -> Heads:
        """As `heads`, but of one tensor qkv `(B, T, d_q + 2 d_kv)`, which `rotary` takes in one pass over memory."""
        if rope is None:
            return self.heads(*self.split(qkv), None)
        options = RotaryOptions(self.n_heads, self.n_kv_heads, rope.interleaved, normalized=False)
        return rotary(qkv, rope.cos, rope.sin, options, scale=None)

    def split(self, qkv: Tensor) -> Heads:
        """Views q `(B, T, d_q)`, k and v `(B, T, d_kv)` of qkv `(B, T, d_q + 2 d_kv)`."""
        q, k, v = qkv.split([self.d_q, self.d_kv, self.d_kv], dim=-1)
        return q, k, v

    def combine(self, heads: Tensor) -> Tensor:
        """Concat(heads) W_o: heads `(B, T, n_heads, d_head)` -> `(B, T, d_model)`."""
        return self.wo(heads.flatten(2))  # eq. 14

    def forward(
        self, x: Tensor, rope: Rope | None, mask: Mask, memory: Tensor | None = None, seeds: Tensor | None = None
    ) -> Tensor:
        """x `(B, T, d_model)` -> the same shape. memory `(B, S, d_model)` gives keys and values; without it x does.

        seeds `(B,)`: of the block's dropout.
        """
        if memory is None:
            q, k, v = self.heads_of_qkv(self.wqkv(x), rope)  # eq. 12
        else:
            sizes, bias = [self.d_q, 2 * self.d_kv], self.wqkv.bias
            w_q, w_kv = self.wqkv.weight(x.dtype).split(sizes)
            b_q, b_kv = (None, None) if bias is None else bias.to(x.dtype).split(sizes)
            k, v = F.linear(memory, w_kv, b_kv).chunk(2, dim=-1)
            q, k, v = self.heads(F.linear(x, w_q, b_q), k, v, rope)
        q, k, v = (heads.to(x.dtype) for heads in (q, k, v))
        if self.cache is not None:
            k, v = self.cache.extend(k, v)
        if seeds is None or not self.dropout.p:
            heads = attention(q, k, v, self.softmax_scale, self.causal, mask)  # eq. 13
        else:
            p, seeds = self.dropout.p, self.dropout.seeds_here(seeds)
            heads = attention_with_dropout(q, k, v, self.softmax_scale, self.causal, mask, p, seeds)
        return self.combine(heads)
