"""Attention with norms of q, k and v, and with a learned number per head."""

from collections.abc import Callable

from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.rotary import QKV, Heads, Rope
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.norms import LearnedScale


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
