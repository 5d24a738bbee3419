"""nGPT, the normalized Transformer on the hypersphere (Loshchilov et al. 2024), section 2.6.

Every hidden state and every row of every matrix has length 1. Attention and MLP are not added to h: h moves towards
h_A = Norm(ATTN(h)) and h_M = Norm(MLP(h)) by the eigen learning rates alpha_A and alpha_M, one per dimension. The
options are the paper's ablations (Tables 4 to 6) and variants (sections 2.2.2, A.2, A.3).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.dispatch import say_without_kernel
from ngpt_train.kernels.norm import normalize
from ngpt_train.kernels.rotary import QKV, Heads, rotary
from ngpt_train.kernels.sphere_step import HiddenState, lerp, riemannian, slerp, sphere_step
from ngpt_train.kernels.swiglu import scaled_swiglu
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.ngpt.keys import AlphaConfig, NGPTConfig, ScaledConfig, ScaleVectorConfig


class NGPTBlock(nn.Module):
    """Two steps on the sphere. There is no other normalisation of h (Table 1, right column). cross: a step between them
    by attention to the encoder's output, as in the decoder of ntransformer."""

    def __init__(self, config: NGPTConfig, causal: bool = True, cross: AlphaConfig | None = None) -> None:
        super().__init__()
        self.attention = NGPTAttention(config, causal)
        self.alpha_attn = EigenLearningRates(config.alpha_attn, config)
        self.mlp = NGPTMLP(config)
        self.alpha_mlp = EigenLearningRates(config.alpha_mlp, config)
        self.step_attn, self.step_mlp = step_of(config, "update_attn"), step_of(config, "update_mlp")
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)
        if cross is not None:
            self.cross = NGPTAttention(config, causal=False)
            self.alpha_cross = EigenLearningRates(cross, config)
            self.drop_cross = Dropout(config.residual_dropout)
            self.step_cross = step_of(config, "update_cross")

    def forward(
        self, h: HiddenState, rope: Rope | None, mask: Mask, memory: Tensor | None = None, memory_mask: Mask = None
    ) -> HiddenState:
        # step(h, x, alpha) = Norm(h + alpha (Norm(x) - h)), unless model.update says otherwise. Dropout comes before
        # Norm(x), which puts x on the sphere.
        alpha_A, alpha_M = self.alpha_attn(), self.alpha_mlp()
        x = self.drop_attn(self.attention(h.to_read, rope, mask))
        h = self.step_attn(h, x, alpha_A)  # eq. 10
        if memory is not None:  # without RoPE: positions in two different sequences have no distance
            x = self.drop_cross(self.cross(h.to_read, None, memory_mask, memory))
            h = self.step_cross(h, x, self.alpha_cross())  # TnT paper, Table 1: h_C
        x = self.drop_mlp(self.mlp(h.to_read))
        h = self.step_mlp(h, x, alpha_M)  # eq. 11
        return h  # (B, T, d_model)


Step = Callable[[HiddenState, Tensor, Tensor], HiddenState]
MOVES = {"lerp": lerp, "slerp": slerp, "riemannian": riemannian}


def step_of(config: NGPTConfig, key: str) -> Step:
    """The step of a block, by the key of `config` for its update; where that is null, by model.update."""
    own: str | None = getattr(config, key)
    key, update = ("update", config.update) if own is None else (key, own)
    if update == "lerp" and not config.norm_eps:
        return sphere_step
    option = f"model.{key}={update}" if update != "lerp" else "model.norm_eps"
    return partial(sphere_step, move=MOVES[update], norm=norm_of(config), option=option)


def norm_of(config: NGPTConfig) -> Callable[[Tensor], Tensor]:
    """Norm of activations, with model.norm_eps."""
    return partial(normalize, eps=config.norm_eps) if config.norm_eps else normalize


class ScaledParameter(nn.Module):
    """A vector s whose stored value starts at s_scale and whose effective value is stored * s_init / s_scale.

    Adam moves every stored entry by about the learning rate, whatever the entry's size. So the effective value moves by
    about lr * s_init / s_scale per step, and one learning rate suits matrices and scales alike.

    Stored in fp32 in every layout and precision: `(size,)` for kind=vector, `(1,)` for kind=scalar. With kind=fixed it
    is a buffer, not a parameter (section A.8, Table 5).
    """

    def __init__(self, size: int, chosen: ScaleVectorConfig, model: ScaledConfig) -> None:
        super().__init__()
        self.size = size
        self.init = value_of(chosen.init, model)
        self.scale = 1.0 if chosen.kind == "fixed" else value_of(chosen.scale, model)
        stored = torch.empty(1 if chosen.kind == "scalar" else size)
        if chosen.kind == "fixed":
            self.register_buffer("stored", stored, persistent=False)
        else:
            self.stored = nn.Parameter(stored)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.stored, self.scale)

    def forward(self) -> Tensor:
        """The effective vector `(size,)`, in the dtype of the stored one."""
        return (self.stored * (self.init / self.scale)).expand(self.size)


def value_of(value: float | str, model: ScaledConfig) -> float:
    """The value of `init` or `scale` in the config: a number, or one of ngpt.keys.SCALE_WORDS, computed for `model`."""
    words = {
        "1/L": 1 / model.n_layers,
        "0.05*L_ref/L": 0.05 / model.relative_depth,
        "0.05*sqrt(L_ref/L)": 0.05 / math.sqrt(model.relative_depth),
        "1/sqrt(d)": 1 / math.sqrt(model.d_model),
        "sqrt(d)": math.sqrt(model.d_model),
        "sqrt(d/d_ref)": math.sqrt(model.relative_width),
    }
    return words[value] if isinstance(value, str) else float(value)


class EigenLearningRates(ScaledParameter):
    """|alpha| `(d_model,)` (section 2.2.2); with alpha_sign=free alpha itself (section A.2)."""

    def __init__(self, chosen: AlphaConfig, config: NGPTConfig) -> None:
        super().__init__(config.d_model, chosen, config)
        self.positive = config.alpha_sign == "positive"

    def forward(self) -> Tensor:
        alpha = super().forward()
        return alpha.abs() if self.positive else alpha


class NGPTAttention(Attention):
    """softmax(sqrt(d_k) q k^T) v W_o, where q and k are normalised per head and scaled by s_qk (section 2.3.2)."""

    def __init__(self, config: NGPTConfig, causal: bool = True) -> None:
        super().__init__(config, softmax_scale(config), causal, unit_rows=config.constraint == "parametrization")
        self.qk_norm, self.norm = config.qk_norm, norm_of(config)
        self.shared = config.s_qk.shared
        self.s_qk = ScaledParameter(self.d_head if self.shared else config.d_model, config.s_qk, config)

    def s_qk_squared(self) -> Tensor:
        """s_qk^2 of each query head `(n_heads * d_head,)`."""
        s_qk = self.s_qk().square()
        return s_qk.repeat(self.n_heads) if self.shared else s_qk

    def heads(self, qkv: QKV, rope: Rope | None) -> Heads:
        """q <- Norm(q) s_qk and k <- Norm(k) s_qk in each head, after RoPE: eq. 15 and 16, which `rotary` has.

        Attention depends on the product of q and k alone, so q gets both factors s_qk. The function is the same. It
        takes one pass over memory less, and fits grouped keys, which have fewer heads than s_qk has.
        """
        return rotary(qkv, rope, self.qk_norm, self.s_qk_squared(), self.norm)


def softmax_scale(config: NGPTConfig) -> float:
    """The factor of q k^T: `model.softmax_scale`.

    The product of unit vectors q and k has variance 1 / d_k, where the baseline's has variance d_k. Of q and k that
    are not normalised, products of unit rows with h, it has variance d_k / d_model^2.
    """
    root = math.sqrt(config.d_head)  # sqrt(d_k)
    return {"sqrt(d_k)": root, "1/sqrt(d_k)": 1 / root, "d/sqrt(d_k)": config.d_model / root}[config.softmax_scale]


class NGPTMLP(MLP):
    """SwiGLU(u, v) W_down, with u and v rescaled (section 2.4.2)."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config, config.activation, unit_rows=config.constraint == "parametrization")
        self.s_u = ScaledParameter(self.d_mlp, config.s_u, config)
        self.s_v = ScaledParameter(self.d_mlp, config.s_v, config)
        self.sqrt_d_model = math.sqrt(config.d_model)

    def hidden(self, x: Tensor) -> Tensor:
        """SwiGLU(u s_u, v s_v sqrt(d_model)) of u = W_u x and v = W_v x (eq. 17, 18).

        The entries of v are products of unit vectors, of the order of 1 / sqrt(d_model), where SiLU is almost linear.
        The factor sqrt(d_model) makes them of order 1 (section A.1).
        """
        s_u = self.s_u()  # eq. 20: u <- u s_u
        s_v = self.s_v() * self.sqrt_d_model  # eq. 21: v <- v s_v sqrt(d_model)
        return SCALED_GATES[self.activation](x, self.w_uv.weight(x.dtype), s_u, s_v)


def scaled_geglu(x: Tensor, w_uv: Tensor, s_u: Tensor, s_v: Tensor) -> Tensor:
    """(s_u u) * GELU(s_v v), the gate of TnT's N-transformer(GELU); arguments as of scaled_swiglu."""
    say_without_kernel("swiglu", "model.activation=gelu", x)
    u, v = F.linear(x, w_uv).chunk(2, dim=-1)
    return s_u * u * F.gelu(s_v * v)


SCALED_GATES: dict[str, Callable[..., Tensor]] = {"silu": scaled_swiglu, "gelu": scaled_geglu}


class Spherical(Decoder):
    """A model on the sphere without its blocks: embedding, head, initialisation. A subclass sets the `s_z`."""

    decays = False  # the projection fixes the length of every row (section 2.6, item 7)
    config: NGPTConfig
    s_z: ScaledParameter

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        h = super().embed(tokens, table)
        return normalize(h) if self.config.constraint == "parametrization" else h

    def drop_embedding(self, h: Tensor) -> Tensor:
        """Back on the sphere, because the first update takes h as it is."""
        dropped = super().drop_embedding(h)
        if dropped is h or not self.on_sphere:
            return dropped
        return norm_of(self.config)(dropped).to(h.dtype)

    def run_blocks(self, blocks: Iterable[nn.Module], h: Tensor, *arguments: Any) -> Tensor:
        return super().run_blocks(blocks, HiddenState.of(h), *arguments).to_read

    def head(self, h: Tensor) -> Head:
        """z = E_output h and z <- z s_z: eq. 1 and 3."""
        parametrized, q = self.config.constraint == "parametrization", self.config.logit_preconditioning
        s_z = self.s_z()
        matrix = normalize(self.unembedding) if parametrized else self.unembedding
        return Head(h, matrix, s_z, gradient_scale=None if q is None else preconditioned(s_z, q))

    def init_std(self, path: str) -> float:
        """Before a projection the same for all matrices, else model.init.*."""
        return super().init_std(path) if self.constraint == "free" else 1 / math.sqrt(self.config.d_model)

    @property
    def on_sphere(self) -> bool:
        return self.config.constraint in ("projection", "parametrization")


def preconditioned(s_z: Tensor, q: float) -> Tensor:
    """(s_z / mean(s_z))^q `(V,)`: dL/du is this times dL/dz, where z = s_z u and u = E_output h.

    Logit gradient preconditioning ("Training nGPT", arXiv 2608.01284; second-hand). The forward pass and dL/ds_z stay.
    Ours: an entry of s_z below 0 keeps its sign, so that the step still goes down.
    """
    ratio = s_z.detach() / s_z.detach().mean().abs()
    return ratio.sign() * ratio.abs().pow(q)


class NGPT(Spherical):
    """Logits = s_z (E_output h), where h is the output of the last block."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config, (NGPTBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.n_outputs, config.s_z, config)


Model = NGPT  # what build_model builds
