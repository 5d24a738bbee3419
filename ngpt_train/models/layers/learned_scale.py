"""Learned factors: of dimensions, and of the heads of attention."""

import math

import torch
from torch import Tensor, nn

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.models.layers.attention import Attention


class LearnedScale(nn.Module):
    """Learned factors `(size,)` that start at `init`: HeadScale's gamma, ResScale's lambda, LayerScale's weights."""

    def __init__(self, size: int, init: float = 1.0) -> None:
        super().__init__()
        self.init = init
        self.gain = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.init)

    def forward(self, x: Tensor) -> Tensor:
        """gain * x over the last dimension, in x's dtype."""
        return (self.gain * x).to(x.dtype)


class HeadScaleAttention(Attention):
    """HeadScaleMHA of the NormFormer paper: Concat(gamma_1 h_1, ..., gamma_n h_n) W_o, where
    h_i = softmax(q_i k_i^T / sqrt(d_k)) v_i.

    head_scale: `before` multiplies gamma before W_o, as in the paper. The authors' code multiplies it after W_o, with
    the output of W_o cut into heads (`after`). With `none` there is no gamma.
    """

    def __init__(self, config: ModelConfig, head_scale: str, causal: bool = True, bias: bool = False) -> None:
        super().__init__(config, 1 / math.sqrt(config.d_model // config.n_heads), causal, bias)
        self.before = head_scale == "before"
        self.head_scale = None if head_scale == "none" else LearnedScale(config.n_heads)

    def combine(self, heads: Tensor) -> Tensor:
        """Concat(gamma_i h_i) W_o: heads `(B, T, n_heads, d_head)` -> `(B, T, d_model)`."""
        if self.head_scale is None:
            return super().combine(heads)
        if self.before:
            return super().combine(self.head_scale(heads.mT).mT)  # heads.mT: (B, T, d_head, n_heads)
        y = super().combine(heads).view_as(heads)
        return self.head_scale(y.mT).mT.flatten(2)
