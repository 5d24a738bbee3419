"""nGPT, the normalized Transformer on the hypersphere (Loshchilov et al. 2024), section 2.6.

Every hidden state and every row of every matrix has length 1. Attention and MLP are not added to h: h moves towards
h_A = Norm(ATTN(h)) and h_M = Norm(MLP(h)) by the eigen learning rates alpha_A and alpha_M, one per dimension. The
options are the paper's ablations (Tables 4 to 6) and variants (sections 2.2.2, A.2, A.3).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.norm import normalize
from ngpt_train.kernels.operation import without_kernel
from ngpt_train.kernels.rotary import RotaryOptions, rotary
from ngpt_train.kernels.scaled_linear import scaled_swiglu
from ngpt_train.kernels.sphere_step import HiddenState, sphere_step
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Attention, Heads
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout, with_seeds
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.norms import normalize_rows_
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.ngpt.keys import AlphaConfig, NGPTConfig
from ngpt_train.models.ngpt.scale import ScaledParameter


class NGPTBlock(nn.Module):
    """Two steps on the sphere. There is no other normalisation of h (Table 1, right column)."""

    def __init__(self, config: NGPTConfig, causal: bool = True) -> None:
        super().__init__()
        self.attention = NGPTAttention(config, causal)
        self.alpha_attn = EigenLearningRates(config.alpha_attn, config)
        self.mlp = NGPTMLP(config)
        self.alpha_mlp = EigenLearningRates(config.alpha_mlp, config)
        self.step_attn, self.step_mlp = step_of(config, "update_attn"), step_of(config, "update_mlp")
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, h: HiddenState, rope: Rope | None, mask: Mask, seeds: Tensor | None = None) -> HiddenState:
        alpha_A, alpha_M = self.alpha_attn(), self.alpha_mlp()
        # step(h, x, alpha) = Norm(h + alpha (Norm(x) - h)), unless model.update says otherwise. Dropout comes before
        # Norm(x), which puts x on the sphere.
        x = self.drop_attn(self.attention(h, rope, mask, seeds=seeds), seeds)
        h = self.step_attn(h, x, alpha_A)  # eq. 10
        x = self.drop_mlp(self.mlp(h), seeds)
        h = self.step_mlp(h, x, alpha_M)  # eq. 11
        return h  # (B, T, d_model)


class EigenLearningRates(ScaledParameter):
    """|alpha| `(d_model,)` (section 2.2.2); with alpha_sign=free alpha itself (section A.2)."""

    def __init__(self, chosen: AlphaConfig, config: NGPTConfig) -> None:
        super().__init__(config.d_model, chosen, config)
        self.positive = config.alpha_sign == "positive"

    def forward(self) -> Tensor:
        alpha = super().forward()
        return alpha.abs() if self.positive else alpha


def without_rotary(*arguments: Any) -> str:
    """Why `NGPTAttention.heads` runs, for the log: no rotary positions, its last argument, or another Norm."""
    return "queries without a rotation, as in cross-attention" if arguments[-1] is None else "model.norm_eps"


class NGPTAttention(Attention):
    """softmax(sqrt(d_k) q k^T) v W_o, where q and k are normalised per head and scaled by s_qk (section 2.3.2)."""

    def __init__(self, config: NGPTConfig, causal: bool = True) -> None:
        super().__init__(config, softmax_scale(config), causal, unit_rows=config.constraint == "parametrization")
        self.qk_norm, self.norm_eps = config.qk_norm, config.norm_eps
        self.shared = config.s_qk.shared
        self.s_qk = ScaledParameter(self.d_head if self.shared else config.d_model, config.s_qk, config)

    def s_qk_squared(self) -> Tensor:
        """s_qk^2 of each query head `(n_heads * d_head,)`."""
        s_qk = self.s_qk().square()
        return s_qk.repeat(self.n_heads) if self.shared else s_qk

    @without_kernel("rotary", without_rotary)
    def heads(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> Heads:
        """q <- Norm(q) s_qk and k <- Norm(k) s_qk in each head, after RoPE: eq. 15 and 16.

        Attention depends on the product of q and k alone, so q gets both factors s_qk. The function is the same. It
        takes one pass over memory less, and fits grouped keys, which have fewer heads than s_qk has.
        """
        q, k, v = super().heads(q, k, v, rope)  # rope(q), rope(k), v
        if self.qk_norm:
            q = normalize(q, self.norm_eps)  # eq. 15
            k = normalize(k, self.norm_eps)  # eq. 16
        return q * self.s_qk_squared().view(self.n_heads, self.d_head), k, v

    def heads_of_qkv(self, qkv: Tensor, rope: Rope | None) -> Heads:
        if rope is None or (self.qk_norm and self.norm_eps):
            return self.heads(*self.split(qkv), rope)
        options = RotaryOptions(self.n_heads, self.n_kv_heads, rope.interleaved, normalized=self.qk_norm)
        # eq. 15 and 16 as in `heads`, in one pass: Norm(rope(q)) s_qk^2, Norm(rope(k)), v.
        return rotary(qkv, rope.cos, rope.sin, options, scale=self.s_qk_squared())

    def forward(  # type: ignore[override]
        self,
        h: HiddenState,
        rope: Rope | None,
        mask: Mask,
        memory: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        return super().forward(h.to_read, rope, mask, memory, seeds)


def softmax_scale(config: NGPTConfig) -> float:
    """The factor of q k^T: `model.softmax_scale`.

    The product of unit vectors q and k has variance 1 / d_k, where the baseline's has variance d_k. Of q and k that
    are not normalised, products of unit rows with h, it has variance d_k / d_model^2.
    """
    root = math.sqrt(config.d_model // config.n_heads)  # sqrt(d_k)
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

    def forward(self, h: HiddenState) -> Tensor:  # type: ignore[override]
        return super().forward(h.to_read)


class Spherical(Decoder):
    """A model on the sphere without its blocks: embedding, head, initialisation and projection.

    A subclass sets `s_z`, the scale of the logits.
    """

    decays = False  # the projection fixes the length of every row (section 2.6, item 7)
    config: NGPTConfig
    s_z: ScaledParameter

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        h = super().embed(tokens, table)
        return normalize(h) if self.config.constraint == "parametrization" else h

    def drop_embedding(self, h: Tensor, seeds: Tensor | None) -> Tensor:
        """Back on the sphere, because the first update takes h as it is."""
        dropped = super().drop_embedding(h, seeds)
        if dropped is h or self.config.constraint == "none":
            return dropped
        return normalize(dropped, self.config.norm_eps).to(h.dtype)

    def run_blocks(
        self, blocks: Iterable[nn.Module], h: Tensor, *arguments: Any, seeds: Tensor | None = None
    ) -> Tensor:
        state = HiddenState.of(h)
        for block, of_block in with_seeds(blocks, seeds):
            state = block(state, *arguments, *of_block)
        return state.to_read

    def head(self, h: Tensor) -> Head:
        """z = E_output h and z <- z s_z: eq. 1 and 3."""
        parametrized = self.config.constraint == "parametrization"
        return Head(h, normalize(self.unembedding) if parametrized else self.unembedding, self.s_z())

    def init_std(self, path: str) -> float:
        """Before a projection the same for all matrices, else model.init.*."""
        return 1 / math.sqrt(self.config.d_model) if self.projects else super().init_std(path)

    @property
    def projects(self) -> bool:
        return self.config.constraint == "projection"

    @property
    def on_sphere(self) -> bool:
        return self.config.constraint != "none"

    def project_(self, skipped: Tensor | None = None) -> None:
        """Normalises every matrix and embedding along the embedding dimension: section 2.6, item 2."""
        if self.projects:
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    normalize_rows_(parameter, skipped)


class NGPT(Spherical):
    """Logits = s_z (E_output h), where h is the output of the last block."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config, (NGPTBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.embedding.shape[0], config.s_z, config)


# The options of model.update and model.activation.


def lerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h + alpha (h_new - h): eq. 8."""
    return h + alpha * (h_new - h)


def slerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """sin((1 - alpha) theta) / sin(theta) h + sin(alpha theta) / sin(theta) h_new, alpha per dimension: eq. 6."""
    # arccos has no derivative at +-1. At the limit SLERP and LERP agree to rounding.
    limit = 1 - torch.finfo(h_new.dtype).eps
    theta = (h * h_new).sum(-1, keepdim=True).clamp(-limit, limit).arccos()
    return (((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * h_new) / theta.sin()


def riemannian(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h - alpha (h (h^T h_new) - h_new): eq. 25, the part of h_new - h that is tangent to the sphere at h."""
    return h - alpha * (h * (h * h_new).sum(-1, keepdim=True) - h_new)


Update = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[HiddenState, Tensor, Tensor], HiddenState]
MOVES: dict[str, Update] = {"lerp": lerp, "slerp": slerp, "riemannian": riemannian}


def step_of(config: NGPTConfig, key: str) -> Step:
    """The step of a block, by the key of `config` for its update; where that is null, by model.update."""
    chosen = getattr(config, key)
    key, update = ("update", config.update) if chosen is None else (key, chosen)
    if update == "lerp" and not config.norm_eps:
        return sphere_step
    return step_by(MOVES[update], config.norm_eps, f"model.{key}={update}" if update != "lerp" else "model.norm_eps")


def step_by(update: Update, eps: float, option: str) -> Step:
    """A step h <- Norm(update(h, h_A, alpha)) with h_A = Norm(x), in the place of eq. 10 and 11.

    eps: of Norm. option: what the kernel of sphere_step does not know, for the log.
    """

    @without_kernel("sphere_step", option)
    def step(h: HiddenState, x: Tensor, alpha: Tensor) -> HiddenState:
        moved = normalize(update(h.to_move, normalize(x, eps), alpha), eps).to(h.to_move.dtype)
        return HiddenState(moved, moved)

    return step


@without_kernel("swiglu", "model.activation=gelu")
def scaled_geglu(x: Tensor, w_uv: Tensor, s_u: Tensor, s_v: Tensor) -> Tensor:
    """(s_u u) * GELU(s_v v), the gate of TnT's N-transformer(GELU); arguments as of scaled_swiglu."""
    u, v = F.linear(x, w_uv).chunk(2, dim=-1)
    return s_u * u * F.gelu(s_v * v)


SCALED_GATES: dict[str, Callable[..., Tensor]] = {"silu": scaled_swiglu, "gelu": scaled_geglu}

Model = NGPT  # what build_model builds
