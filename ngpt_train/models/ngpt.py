"""nGPT, the normalized Transformer on the hypersphere (Loshchilov et al. 2024), section 2.6.

Every hidden state and every row of every matrix is a point of the unit sphere. A block does not add
to h, it moves h towards the point it suggests, by a learned share alpha per dimension.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.config.schema import NGPTConfig
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.norms import normalize, normalize_rows_
from ngpt_train.models.layers.rope import Rope, rotate
from ngpt_train.models.layers.scale import ScaledParameter


def sphere_step(h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
    """Norm(h + |alpha| (Norm(suggestion) - h)): a step from h towards the suggestion and back onto the sphere.

    h, suggestion `(B, T, d_model)`, alpha `(d_model,)`. Computed at least in fp32, returned in h's dtype.
    """
    return normalize(h + alpha.abs() * (normalize(suggestion) - h)).to(h.dtype)


class NGPTAttention(Attention):
    """softmax(sqrt(d_k) q k^T) v W_o with q and k on the sphere of their head."""

    def __init__(self, config: NGPTConfig) -> None:
        # q and k have length 1, so q k^T has variance 1 / d_k where the baseline's has d_k.
        super().__init__(config, softmax_scale=math.sqrt(config.d_model // config.n_heads))
        self.s_qk = ScaledParameter(config.d_model, init=1.0, scale=1 / math.sqrt(config.d_model))

    def queries_and_keys(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Norm(rope(q)) s_qk and Norm(rope(k)) s_qk: eq. 15 and 16.

        Only the product of q and k counts, so both factors s_qk go to q: the same function, one pass
        less, and right for grouped keys, which have fewer heads than s_qk.
        """
        s_qk = self.s_qk().view(self.n_heads, self.d_head)
        return normalize(rotate(q, rope)) * s_qk.square(), normalize(rotate(k, rope))


class NGPTMLP(MLP):
    """(s_u u * SiLU(sqrt(d_model) s_v v)) W_down."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        d_mlp = self.w_u.shape[0]
        self.s_u = ScaledParameter(d_mlp, init=1.0, scale=1.0)
        self.s_v = ScaledParameter(d_mlp, init=1.0, scale=1.0)
        self.sqrt_d_model = math.sqrt(config.d_model)

    def hidden(self, u: Tensor, v: Tensor) -> Tensor:
        """eq. 20 and 21. v is a product of unit vectors, with entries near 1 / sqrt(d_model), where SiLU
        would be linear: sqrt(d_model) brings them back to order 1."""
        return self.s_u() * u * F.silu(self.s_v() * self.sqrt_d_model * v)


class NGPTBlock(nn.Module):
    """Two steps on the sphere; no other normalisation."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.attention = NGPTAttention(config)
        self.alpha_attn = ScaledParameter(config.d_model, init=0.05, scale=1 / math.sqrt(config.d_model))
        self.mlp = NGPTMLP(config)
        self.alpha_mlp = ScaledParameter(config.d_model, init=0.05, scale=1 / math.sqrt(config.d_model))

    def forward(self, h: Tensor, rope: Rope, mask: Tensor | None) -> Tensor:
        h = sphere_step(h, self.attention(h, rope, mask), self.alpha_attn())  # eq. 10
        h = sphere_step(h, self.mlp(h), self.alpha_mlp())  # eq. 11
        return h  # (B, T, d_model)


class NGPT(Decoder):
    """Logits = s_z W_output h, with h from n_layers blocks."""

    decays = False  # the projection fixes the length of every row (section 2.6, item 7)

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config, (NGPTBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.output.shape[0], init=1.0, scale=1 / math.sqrt(config.d_model))

    def head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.output.to(h.dtype)) * self.s_z()  # eq. 3, (B, T, V)

    def init_std(self, name: str) -> float:
        return 1 / math.sqrt(self.config.d_model)

    def project_(self) -> None:
        """Section 2.6, item 2: every matrix and both embeddings, along the embedding dimension."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                normalize_rows_(parameter)
