"""Multi-head attention, with grouped key/value heads: causal, in both directions, or to another sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.attention import Mask, attention
from ngpt_train.kernels.rotary import rotary
from ngpt_train.models.layers.matrix import InUse, Stacked, as_stored
from ngpt_train.models.layers.rope import Rope, rotate


class Attention(nn.Module):
    """softmax(scale * q k^T) v W_o, where an architecture may say in `heads` what q and k are.

    All matrices store points of the model's space as rows: W_q, W_k, W_v as `(heads * d_head, d_model)`, one below
    the other in `wqkv` because one product of all three is faster, and W_o as `(heads * d_head, d_model)`, applied
    from the right.
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
        self.d_q, self.d_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.wqkv = nn.Parameter(torch.empty(self.d_q + 2 * self.d_kv, config.d_model))
        self.wo = nn.Parameter(torch.empty(self.d_q, config.d_model))
        self.bqkv = nn.Parameter(torch.empty(self.d_q + 2 * self.d_kv)) if bias else None
        self.bo = nn.Parameter(torch.empty(config.d_model)) if bias else None
        self.stacked: Stacked = {
            "wqkv": {"wq": self.d_q, "wk": self.d_kv, "wv": self.d_kv},
            "bqkv": {"bq": self.d_q, "bk": self.d_kv, "bv": self.d_kv},
        }

    def reset_parameters(self) -> None:
        for bias in (self.bqkv, self.bo):
            if bias is not None:
                nn.init.zeros_(bias)

    def heads(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """From one product `(B, T, (n_heads + 2 n_kv_heads) D)` to q `(B, T, n_heads, D)`, k and v of n_kv_heads."""
        if rope is None:
            return self.compared(*self.split(qkv), None)
        return rotary(qkv, rope.cos, rope.sin, self.n_heads, self.n_kv_heads, rope.interleaved, False, None)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split([self.d_q, self.d_kv, self.d_kv], dim=-1)
        return q, k, v

    def compared(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """As `heads`, from three projections, which may be of two sequences: `(B, T, heads * D)`."""
        q, k, v = (x.unflatten(-1, (-1, self.d_head)) for x in (q, k, v))
        return rotate(q, rope), rotate(k, rope), v

    def combine(self, heads: Tensor) -> Tensor:
        """Concat(heads) W_o: heads `(B, T, H, D)` -> `(B, T, d_model)`."""
        y = heads.flatten(2) @ self.in_use(self.wo, heads.dtype)
        return y if self.bo is None else y + self.bo.to(y.dtype)

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, memory: Tensor | None = None) -> Tensor:
        """x `(B, T, d_model)` -> the same shape, with keys and values from memory `(B, S, d_model)`, if not from x."""
        matrix, bias = self.in_use(self.wqkv, x.dtype), self.bqkv
        if memory is None:
            q, k, v = self.heads(linear(x, matrix, bias), rope)
        else:
            of_x, of_memory = matrix[: self.d_q], matrix[self.d_q :]
            assert bias is None  # no architecture that attends to another sequence has biases
            k, v = F.linear(memory, of_memory).chunk(2, dim=-1)
            q, k, v = self.compared(F.linear(x, of_x), k, v, rope)
        q, k, v = (heads.to(x.dtype) for heads in (q, k, v))
        return self.combine(attention(q, k, v, self.softmax_scale, self.causal, mask))


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b in x's dtype; biases are stored in fp32."""
    return F.linear(x, matrix, None if bias is None else bias.to(x.dtype))
