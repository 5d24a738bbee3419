"""A decoder composed of options: which norm, where it stands, and what else is in a block.

placement.py has the equations of a block's two steps, norms.py the norms. With the defaults the model is gpt/model.py,
with others normformer/model.py or powernorm/model.py; docs/architectures.md has the table.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ngpt_train.kernels.operation import without_kernel
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.composed.norms import NormPass, norm_of
from ngpt_train.models.composed.placement import PLACEMENTS, Around
from ngpt_train.models.layers.attention import Heads
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.learned_scale import HeadScaleAttention, LearnedScale
from ngpt_train.models.layers.mlp import MLP, PlainMLP
from ngpt_train.models.layers.positions import add_positions, learned_positions
from ngpt_train.models.layers.rope import Rope, rotate
from ngpt_train.models.powernorm.running_statistics import DecoderOverBatch, NormOverBatch, Output, Running


class ComposedBlock(nn.Module):
    """Attention, then MLP, each in its placement. It returns x and the batch statistics of its norms over the batch."""

    def __init__(self, config: ComposedConfig, causal: bool = True) -> None:
        super().__init__()
        d_mlp = config.d_mlp or 4 * config.d_model
        self.place_attn, self.place_mlp = (PLACEMENTS[config.placement_of(f)] for f in ("attn", "mlp"))
        self.norm_attn, self.norm_post_attn = self.place_attn.norms(lambda: norm_of(config, config.d_model))
        self.attention = ComposedAttention(config, causal)
        self.norm_mlp, self.norm_post_mlp = self.place_mlp.norms(lambda: norm_of(config, config.d_model))
        self.mlp = MLPS[config.mlp](config, config.activation, bias=config.bias)
        self.norm_ffn = FFN_NORMS[config.ffn_norm](config, d_mlp)
        self.res_scale_attn, self.res_scale = (res_scale(config, f) for f in ("attn", "mlp"))
        self.layer_scale_attn, self.layer_scale_mlp = layer_scale(config), layer_scale(config)
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)
        self.number_norms()

    def forward(
        self,
        x: Tensor,
        rope: Rope | None,
        mask: Mask,
        valid: Tensor | None,
        running: Running,
        seeds: Tensor | None = None,
    ) -> Output:
        """x `(B, T, d_model)`; valid `(B, T)` is false for padding, None: all are valid; running: one per norm."""
        norms = NormPass(valid, running)
        x = self.attention_step(x, rope, mask, norms, seeds)
        x = self.mlp_step(x, norms, seeds)
        return x, tuple(norms.batches)

    def attention_step(self, x: Tensor, rope: Rope | None, mask: Mask, norms: NormPass, seeds: Tensor | None) -> Tensor:
        """For example x + attention(norm(x)): placement.py."""
        norm_in, norm_out = norms(self.norm_attn), norms(self.norm_post_attn)
        drop = partial(self.drop_attn, seeds=seeds)
        around = Around(norm_in, norm_out, self.res_scale_attn, self.layer_scale_attn, drop)
        return self.place_attn.apply(x, lambda y: self.attention(y, rope, mask, seeds=seeds), around)

    def mlp_step(self, x: Tensor, norms: NormPass, seeds: Tensor | None) -> Tensor:
        """For example x + W_down norm_ffn(hidden(norm(x)))."""
        norm_in, norm_out, norm_ffn = norms(self.norm_mlp), norms(self.norm_post_mlp), norms(self.norm_ffn)
        drop = partial(self.drop_mlp, seeds=seeds)
        around = Around(norm_in, norm_out, self.res_scale, self.layer_scale_mlp, drop)
        return self.place_mlp.apply(x, lambda y: self.mlp.w_down(norm_ffn(self.mlp.hidden(y)).to(y.dtype)), around)

    def norms(self) -> list[NormOverBatch]:
        """The norms over the batch, in the order in which `forward` takes and returns their statistics."""
        return [module for module in self.modules() if isinstance(module, NormOverBatch)]

    def number_norms(self) -> None:
        for place, norm in enumerate(self.norms()):
            norm.place = place


MLPS: dict[str, Any] = {"gated": MLP, "plain": PlainMLP}
FFN_NORMS: dict[str, Any] = {
    "none": lambda config, size: nn.Identity(),
    "norm": norm_of,
    "gain": lambda config, size: LearnedScale(size),
}


def res_scale(config: ComposedConfig, sublayer: str) -> nn.Module:
    """ResScale's lambda on the residual of `attn` or `mlp` (section 3 of the NormFormer paper)."""
    return LearnedScale(config.d_model) if config.res_scale in (sublayer, "both") else nn.Identity()


def layer_scale(config: ComposedConfig) -> nn.Module:
    """LayerScale on what a sublayer adds (Touvron et al. 2021)."""
    return nn.Identity() if config.layer_scale is None else LearnedScale(config.d_model, config.layer_scale)


class ComposedAttention(HeadScaleAttention):
    """Attention with HeadScale, and with norms of q and k in each head or of q, k and v over all heads."""

    def __init__(self, config: ComposedConfig, causal: bool = True) -> None:
        super().__init__(config, config.head_scale, causal, config.bias)

        def norm(wanted: bool, size: int) -> nn.Module:
            return norm_of(config, size) if wanted else nn.Identity()

        over_all_heads = [norm(config.qkv_norm, size) for size in (self.d_q, self.d_kv, self.d_kv)]
        self.norm_q, self.norm_k, self.norm_v = over_all_heads
        self.q_norm, self.k_norm = norm(config.qk_norm, self.d_head), norm(config.qk_norm, self.d_head)
        self.has_norms = config.qk_norm or config.qkv_norm

    def heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        return self.normed_heads(q, k, v, rope) if self.has_norms else super().heads(q, k, v, rope)

    def heads_of_qkv(self, qkv: Tensor, rope: Rope | None) -> Heads:
        return self.normed_heads(*self.split(qkv), rope) if self.has_norms else super().heads_of_qkv(qkv, rope)

    @without_kernel("rotary", lambda *arguments: None if arguments[-1] is None else "norms of q and k")
    def normed_heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        """rope(norm(q)), rope(norm(k)) and norm(v) in heads, where norms that were not chosen are the identity."""
        q, k, v = self.norm_q(q), self.norm_k(k), self.norm_v(v)
        q, k, v = (x.unflatten(-1, (-1, self.d_head)) for x in (q, k, v))
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v


class Composition(DecoderOverBatch):
    """What the composed decoder and encoder-decoder share: embedding, positions and initialisation."""

    config: ComposedConfig
    positions: Tensor | None

    def init_std(self, path: str) -> float:
        """As a decoder's; model.deep_init divides those of block l = 1, 2, ... by sqrt(l)."""
        std, parts = super().init_std(path), path.split(".")
        in_block = parts[0] in ("layers", "encoder")
        return std / math.sqrt(int(parts[1]) + 1) if self.config.deep_init and in_block else std

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        h = super().embed(tokens, table)
        if self.config.embedding_gradient != 1:
            h = _ScaledGradient.apply(h, self.config.embedding_gradient)
        return h * math.sqrt(self.config.d_model) if self.config.scaled_embedding else h

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        added = self.config.positions in ("sinusoidal", "learned")
        return add_positions(h, positions, self.positions) if added else h

    def final_norm(self) -> nn.Module:
        """The norm after the last block; with `post` the block itself ends with one."""
        has_one = self.config.placement_of("mlp") != "post"
        return norm_of(self.config, self.config.d_model) if has_one else nn.Identity()


class _ScaledGradient(torch.autograd.Function):
    """x, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Composed(Composition):
    """Logits = E_output norm(x), where x is the output of the last block; `stack` ends with the norm."""

    def __init__(self, config: ComposedConfig) -> None:
        super().__init__(config, (ComposedBlock(config) for _ in range(config.n_layers)))
        self.norm_final = self.final_norm()
        self.positions = learned_positions(config)


Model = Composed  # what build_model builds
