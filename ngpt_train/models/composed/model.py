"""A decoder composed of options: which norm, where it stands, and what else is in a block.

layers/norms.py has the norms and the equation of a sublayer. With the defaults the model is gpt/model.py, with others
normformer/model.py or powernorm/model.py; docs/architectures.md has the table.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.decoder import Head, ParameterGroup, in_matrices
from ngpt_train.models.layers.attention import NormedAttention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.linear import FusedLinear
from ngpt_train.models.layers.mlp import MLPS
from ngpt_train.models.layers.norms import CogViewNorm, Derf, DyT, LayerNorm, LearnedScale, Map, RMSNorm, residual
from ngpt_train.models.layers.positions import add_positions
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.powernorm.keys import OVER_BATCH
from ngpt_train.models.powernorm.model import NORMS as POWERNORMS
from ngpt_train.models.powernorm.running_statistics import DecoderOverBatch, NormPass, Output


class ComposedBlock(nn.Module):
    """Attention, then MLP, each in its placement. It returns x and the batch statistics of its norms over the batch.
    cross: between them attention to the encoder's output, with the placement, norms and scales of attention."""

    def __init__(self, config: ComposedConfig, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.config = config
        self.norm_attn, self.norm_post_attn = norms_of(config, "attn")
        self.attention = attention_of(config, causal)
        self.norm_mlp, self.norm_post_mlp = norms_of(config, "mlp")
        self.mlp = MLPS[config.mlp](config, config.activation, bias=config.bias)
        self.norm_ffn = FFN_NORMS[config.ffn_norm](config, self.mlp.d_mlp)
        self.res_scale_attn, self.res_scale = (res_scale(config, f) for f in ("attn", "mlp"))
        self.layer_scale_attn, self.layer_scale_mlp = layer_scale(config), layer_scale(config)
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)
        if cross:
            self.norm_cross, self.norm_post_cross = norms_of(config, "attn")
            self.cross = attention_of(config, causal=False)
            self.res_scale_cross, self.layer_scale_cross = res_scale(config, "attn"), layer_scale(config)
            self.drop_cross = Dropout(config.residual_dropout)
        self.drop_hidden = Dropout(config.activation_dropout)  # the last, so that the others keep their places
        if config.separate_gains:
            for product in [module for module in self.modules() if type(module) is FusedLinear]:
                product.add_gains()

    def forward(self, x: Tensor, rope: Rope | None, mask: Mask, *more: Any) -> Output:
        """x `(B, T, d_model)`. more: with an encoder, its output `(B, S, d_model)` and the mask of cross-attention;
        then valid `(B, T)`, false for padding, None: no padding; then the running statistics of each norm."""
        *of_memory, valid, running = more
        norms = NormPass(valid, running)
        x = self.step("attn", x, partial(self.attention, rope=rope, mask=mask), self.res_scale_attn, norms)
        if of_memory:  # without positions
            memory, memory_mask = of_memory
            attend = partial(self.cross, rope=None, mask=memory_mask, memory=memory)
            x = self.step("cross", x, attend, self.res_scale_cross, norms)
        x = self.step("mlp", x, partial(self.mlp, norm_ffn=self.of_hidden(norms)), self.res_scale, norms)
        return x, tuple(norms.batches)

    def of_hidden(self, norms: NormPass) -> Map:
        """Dropout and the norm of the MLP's hidden state."""
        norm = norms(self.norm_ffn)
        return lambda hidden: norm(self.drop_hidden(hidden))

    def step(self, sublayer: str, x: Tensor, f: Map, lambda_: Map, norms: NormPass) -> Tensor:
        """x + f(norm(x)), or the form of the placement of this sublayer: `attn`, `cross` or `mlp`."""
        parts = ("norm", "norm_post", "layer_scale", "drop")
        norm_in, norm_post, gamma, drop = (getattr(self, f"{part}_{sublayer}") for part in parts)
        post = self.config.placement_of("mlp" if sublayer == "mlp" else "attn") == "post"
        after: dict[str, Map] = {"norm_sum" if post else "norm_out": norms(norm_post)}
        return residual(x, f, drop, norm_in=norms(norm_in), lambda_=lambda_, gamma=gamma, **after)


PER_TOKEN: dict[str, Callable[[int, float], nn.Module]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "layer_no_bias": partial(LayerNorm, bias=False),
    "layer_no_gain": partial(LayerNorm, gain=False),
    "layer_plain": partial(LayerNorm, gain=False, bias=False),
    "cogview": CogViewNorm,
    "dyt": DyT,
    "derf": Derf,
}


def norm_of(config: ComposedConfig, size: int) -> nn.Module:
    """The norm of config.norm over the last dimension of x `(..., size)`. Only PowerNorm's four have layer-scale."""
    if config.norm in OVER_BATCH or (config.norm == "layer" and config.group_scaling):
        return POWERNORMS[config.norm](size, config)
    return PER_TOKEN[config.norm](size, config.dyt_alpha if config.norm in ("dyt", "derf") else config.norm_eps)


def norms_of(config: ComposedConfig, sublayer: str) -> tuple[nn.Module, nn.Module]:
    """The norms before and after a sublayer, `attn` or `mlp`; where its placement has none, the identity."""
    placement = config.placement_of(sublayer)
    before, after = placement in ("pre", "peri"), placement in ("post", "peri", "reordered")
    first, second = (norm_of(config, config.d_model) if there else nn.Identity() for there in (before, after))
    return RMSNorm(config.d_model, config.norm_eps, gain=False) if config.separate_gains else first, second


def attention_of(config: ComposedConfig, causal: bool) -> NormedAttention:
    options = {"qk_norm": config.qk_norm, "qkv_norm": config.qkv_norm}
    norm = partial(norm_of, config)
    return NormedAttention(config, norm, causal, config.bias, head_scale=config.head_scale, **options)


FFN_NORMS: dict[str, Any] = {
    "none": lambda config, size: nn.Identity(),
    "norm": norm_of,
    "gain": lambda config, size: LearnedScale(size),
}


def res_scale(config: ComposedConfig, sublayer: str) -> nn.Module:
    """ResScale's lambda on the residual of `attn` or `mlp` (section 3 of the NormFormer paper)."""
    return LearnedScale(config.d_model) if config.res_scale in (sublayer, "both") else nn.Identity()


def layer_scale(config: ComposedConfig) -> nn.Module:
    """LayerScale on the output of a sublayer (Touvron et al. 2021)."""
    return nn.Identity() if config.layer_scale is None else LearnedScale(config.d_model, config.layer_scale)


ALIGNED = 8  # columns for a bias of the output, which keep the products' width a multiple of 8

# Gains of norms whose output a matrix reads, and `model.separate_gains`; other gains follow a matrix.
INPUT_GAINS = (*(f"norm_{place}.gain" for place in ("attn", "cross", "mlp", "ffn", "encoder", "final")), ".gains")


class Composition(DecoderOverBatch):
    """Embedding, positions and initialisation of the composed decoder and encoder-decoder."""

    config: ComposedConfig
    positions: Tensor | None

    def __init__(self, config: ComposedConfig, *stacks: Iterable[nn.Module]) -> None:
        super().__init__(config, *stacks)
        self.norm_embedding = norm_of(config, config.d_model) if config.embedding_norm else None

    def init_std(self, path: str) -> float:
        """As a decoder's. model.deep_init divides the matrices of block l = 1, 2, ... by sqrt(l)."""
        std, parts = super().init_std(path), path.split(".")
        in_block = parts[0] in ("layers", "encoder")
        return std / math.sqrt(int(parts[1]) + 1) if self.config.deep_init and in_block else std

    def parameter_groups(self, by_kind: bool = False) -> list[ParameterGroup]:
        """With model.input_gain_decay one more group: the gains on what matrices read, which decay too."""
        *matrices, vectors = super().parameter_groups(by_kind)
        if not self.config.input_gain_decay:
            return [*matrices, vectors]
        decayed = [name for name in vectors.names if name.endswith(INPUT_GAINS)]
        others = [name for name in vectors.names if name not in decayed]
        return [*matrices, replace(vectors, names=decayed, decay=True), replace(vectors, names=others)]

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        h = super().embed(tokens, table)
        if self.config.embedding_gradient != 1:
            h = _ScaledGradient.apply(h, self.config.embedding_gradient)
        return h * math.sqrt(self.config.d_model) if self.config.scaled_embedding else h

    def add_positions(self, h: Tensor, positions: Tensor) -> Tensor:
        added = self.config.positions in ("sinusoidal", "learned")
        return add_positions(h, positions, self.positions) if added else h

    def norm_first(self, h: Tensor) -> Tensor:
        return h if self.norm_embedding is None else self.norm_embedding(h)


def final_norm(config: ComposedConfig) -> nn.Module:
    """The norm after the last block; with `post` the block itself ends with one."""
    has_one = config.placement_of("mlp") != "post"
    return norm_of(config, config.d_model) if has_one else nn.Identity()


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
        self.norm_final = final_norm(config)
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.context, config.d_model)) if learned else None
        self.masked_head = MaskedHead(config, self.n_outputs) if config.masked_head else None

    def head(self, h: Tensor) -> Head:
        return super().head(h) if self.masked_head is None else self.masked_head(h, self.unembedding)

    def flops_per_token(self, context: int, causal: bool = False) -> int:
        of_head = 0 if self.masked_head is None else in_matrices(self.masked_head) * self.config.predicted(context)
        return super().flops_per_token(context, causal) + 6 * of_head // context


class MaskedHead(nn.Module):
    """BERT's head (Devlin et al. 2019, their code): logits = E_output norm(gelu(W_head x + b_head)) + b_output."""

    def __init__(self, config: ComposedConfig, n_outputs: int) -> None:
        super().__init__()
        self.dense = FusedLinear({"w_head": config.d_model}, config.d_model, bias=True)
        self.norm_head = norm_of(config, config.d_model)
        self.b_output = nn.Parameter(torch.empty(n_outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.b_output)

    def forward(self, x: Tensor, unembedding: Tensor) -> Head:
        """x `(B, T, d_model)`. b_output is a column of the matrix, for a 1 behind each h; zeros follow it."""
        h = self.norm_head(F.gelu(self.dense(x)))
        one = F.pad(h.new_ones(1), (0, ALIGNED - 1))
        h = torch.cat([h, one.expand(*h.shape[:-1], -1)], dim=-1)
        return Head(h, torch.cat([unembedding, F.pad(self.b_output[:, None], (0, ALIGNED - 1))], dim=1))


Model = Composed  # what build_model builds
