"""nGPT, the normalized Transformer on the hypersphere (Loshchilov et al. 2024), section 2.6.

Every hidden state and every row of every matrix is a point of the unit sphere. A block does not add
to h, it moves h towards the point it suggests, by a learned share alpha per dimension. The options
are the paper's ablations (Tables 4 to 6) and variants (sections 2.2.2, A.2, A.3).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.dispatch import falls_back
from ngpt_train.kernels.rotary import rotary
from ngpt_train.kernels.scaled_linear import scaled_swiglu
from ngpt_train.kernels.sphere_step import sphere_step
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.matrix import InUse, as_stored, unit_rows
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.norms import normalize, normalize_rows_
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.layers.scale import ScaledParameter
from ngpt_train.models.ngpt.keys import NGPTConfig

# h two times: attention or the MLP reads one, the next step on the sphere moves the other, and in the backward pass
# their gradients reach `sphere_step` apart, which saves adding them up.
Twice = tuple[Tensor, Tensor]


def lerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h + alpha (h_new - h): eq. 8."""
    return h + alpha * (h_new - h)


def slerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """sin((1 - alpha) theta) / sin(theta) h + sin(alpha theta) / sin(theta) h_new, alpha per dimension: eq. 6."""
    # arccos has no derivative at +-1; so close, the arc is a straight line to rounding.
    limit = 1 - torch.finfo(h_new.dtype).eps
    theta = (h * h_new).sum(-1, keepdim=True).clamp(-limit, limit).arccos()
    return (((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * h_new) / theta.sin()


def riemannian(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h - alpha (h (h^T h_new) - h_new): eq. 25, the part of h_new - h that is tangent to the sphere at h."""
    return h - alpha * (h * (h * h_new).sum(-1, keepdim=True) - h_new)


UPDATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "lerp": lerp,
    "slerp": slerp,
    "riemannian": riemannian,
}


def matrices(config: NGPTConfig) -> InUse:
    return unit_rows if config.constraint == "parametrization" else as_stored


class NGPTAttention(Attention):
    """softmax(sqrt(d_k) q k^T) v W_o with q and k on the sphere of their head."""

    def __init__(self, config: NGPTConfig, causal: bool = True) -> None:
        # q and k have length 1, so q k^T has variance 1 / d_k where the baseline's has d_k.
        super().__init__(config, math.sqrt(config.d_model // config.n_heads), causal, in_use=matrices(config))
        self.qk_norm = config.qk_norm
        self.s_qk = ScaledParameter(config.d_model, config.s_qk, config)

    def heads(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """Norm(rope(q)) s_qk and Norm(rope(k)) s_qk: eq. 15 and 16.

        Only the product of q and k counts, so both factors s_qk go to q: the same function, one pass
        less, and right for grouped keys, which have fewer heads than s_qk.
        """
        if rope is None:
            return self.compared(*self.split(qkv), None)
        heads = self.n_heads, self.n_kv_heads
        return rotary(qkv, rope.cos, rope.sin, *heads, rope.interleaved, self.qk_norm, scale=self.s_qk().square())

    def compared(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same, step by step: of two sequences there is no rotation (model.qk_norm=false: no Norm)."""
        falls_back("rotary", q, "queries without a rotation, as in cross-attention")
        q, k, v = super().compared(q, k, v, rope)
        if self.qk_norm:
            q, k = normalize(q), normalize(k)
        return q * self.s_qk().view(self.n_heads, self.d_head).square(), k, v


class NGPTMLP(MLP):
    """(s_u u * SiLU(sqrt(d_model) s_v v)) W_down."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config, config.activation, in_use=matrices(config))
        self.s_u = ScaledParameter(self.d_mlp, config.s_u, config)
        self.s_v = ScaledParameter(self.d_mlp, config.s_v, config)
        self.sqrt_d_model = math.sqrt(config.d_model)

    def gated(self, x: Tensor, w_uv: Tensor) -> Tensor:
        """eq. 20 and 21. v is a product of unit vectors, with entries near 1 / sqrt(d_model), where SiLU
        would be linear: sqrt(d_model) brings them back to order 1."""
        s_u, s_v = self.s_u(), self.s_v() * self.sqrt_d_model
        if self.activation is F.silu:
            return scaled_swiglu(x, w_uv, s_u, s_v)
        falls_back("swiglu", x, f"model.activation={self.activation.__name__}")
        u, v = F.linear(x, w_uv).chunk(2, dim=-1)
        return s_u * u * self.activation(s_v * v)


class NGPTBlock(nn.Module):
    """Two steps on the sphere; no other normalisation."""

    def __init__(self, config: NGPTConfig, causal: bool = True) -> None:
        super().__init__()
        self.attention = NGPTAttention(config, causal)
        self.alpha_attn = ScaledParameter(config.d_model, config.alpha_attn, config)
        self.mlp = NGPTMLP(config)
        self.alpha_mlp = ScaledParameter(config.d_model, config.alpha_mlp, config)
        self.update = UPDATES[config.update]
        self.positive = config.alpha_sign == "positive"

    def sphere_step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Twice:
        """Norm(h + |alpha| (Norm(suggestion) - h)): a step towards the suggestion and back onto the sphere.

        That is model.update=lerp; slerp and riemannian take another step. alpha_sign=free leaves out |.|.

        h, suggestion `(B, T, d_model)`, alpha `(d_model,)`. Computed at least in fp32, returned in h's dtype.
        """
        alpha = alpha.abs() if self.positive else alpha
        if self.update is lerp:
            return sphere_step(h, suggestion, alpha)
        falls_back("sphere_step", h, f"model.update={self.update.__name__}")
        h = normalize(self.update(h, normalize(suggestion), alpha)).to(h.dtype)
        return h, h

    def forward(self, twice: Twice, rope: Rope | None, mask: Mask) -> Twice:
        h, x = twice
        h, x = self.sphere_step(h, self.attention(x, rope, mask), self.alpha_attn())  # eq. 10
        h, x = self.sphere_step(h, self.mlp(x), self.alpha_mlp())  # eq. 11
        return h, x  # (B, T, d_model)


class Spherical(Decoder):
    """What a model on the sphere has apart from its blocks; `s_z` is its scale of the logits."""

    decays = False  # the projection fixes the length of every row (section 2.6, item 7)
    config: NGPTConfig
    s_z: ScaledParameter

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        h = super().embed(tokens, table)
        return normalize(h) if self.config.constraint == "parametrization" else h

    def through(self, blocks: Iterable[nn.Module], h: Tensor, *arguments: Any) -> Tensor:
        # As compiled blocks give it on, so that one graph serves them all: without gradients they give one tensor.
        twice = h, h.view_as(h) if torch.is_grad_enabled() else h
        for block in blocks:
            twice = block(twice, *arguments)
        return twice[1]

    def head(self, h: Tensor) -> Head:
        parametrized = self.config.constraint == "parametrization"
        return Head(h, normalize(self.unembedding) if parametrized else self.unembedding, self.s_z())  # eq. 3

    def init_std(self, name: str) -> float:
        return 1 / math.sqrt(self.config.d_model)

    @property
    def projects(self) -> bool:
        return self.config.constraint == "projection"

    def project_(self, skipped: Tensor | None = None) -> None:
        """Section 2.6, item 2: every matrix and every embedding, along the embedding dimension."""
        if self.projects:
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    normalize_rows_(parameter, skipped)


class NGPT(Spherical):
    """Logits = s_z W_output h, with h from n_layers blocks."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config, (NGPTBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.embedding.shape[0], config.s_z, config)


Model = NGPT  # what build_model builds
