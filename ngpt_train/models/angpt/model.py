"""anGPT, the approximately normalized GPT (Franke et al. 2025, arXiv 2505.22014).

nGPT without its norms of h: constants nu in their place keep E|h| = 1 at the start, where h has length 1 and the rows
of matrices are independent directions. Training keeps rows at length 1 at most. The formulas are second-hand, and what
is ours stands in docs/architectures.md.

    h <- nu(alpha) (h + alpha (x - h)),  nu(alpha) = 1 / sqrt(alpha^2 + (1 - alpha)^2),  x = ATTN(h), then MLP(h)
"""

import math

from torch import Tensor, nn

from ngpt_train.kernels.norm import at_least_fp32, cast
from ngpt_train.kernels.rotary import QKV, Heads, rotary
from ngpt_train.models.angpt.keys import AnGPTConfig
from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.norms import Map, identity
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.ngpt.model import ScaledParameter


class AnGPTBlock(nn.Module):
    """Two steps from h towards what attention and MLP suggest, without a norm."""

    def __init__(self, config: AnGPTConfig) -> None:
        super().__init__()
        self.attention = AnGPTAttention(config)
        self.alpha_attn = ScaledParameter(config.d_model, config.alpha_attn, config)
        self.mlp = AnGPTMLP(config)
        self.alpha_mlp = ScaledParameter(config.d_model, config.alpha_mlp, config)
        self.drop_attn, self.drop_mlp = Dropout(config.residual_dropout), Dropout(config.residual_dropout)

    def forward(self, h: Tensor, rope: Rope | None, mask: Mask) -> Tensor:
        h = step(h, self.drop_attn(self.attention(h, rope, mask)), self.alpha_attn())
        h = step(h, self.drop_mlp(self.mlp(h)), self.alpha_mlp())
        return h  # (B, T, d_model)


def step(h: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
    """nu(alpha) (h + alpha (x - h)) in h's shape and dtype: h, x `(..., d_model)`, alpha `(d_model,)` fp32."""
    wide = at_least_fp32(h)
    return cast(nu(alpha) * (wide + alpha * (x - wide)), h.dtype)


def nu(alpha: Tensor) -> Tensor:
    """1 / sqrt(alpha^2 + (1 - alpha)^2): keeps the variance of a coordinate where h and x are independent."""
    return (alpha.square() + (1 - alpha).square()).rsqrt()


class AnGPTAttention(Attention):
    """W_o Concat(softmax(sqrt(d_k) q k^T) v), with q and k normalised in each head.

    nu_qkv = sqrt(d / d_k) would give each head of v length 1, and nu_p = sqrt(d_k / d) would take the n_heads of them
    back to one length of 1. Their product is 1, and the length of q and k has no part.
    """

    def __init__(self, config: AnGPTConfig) -> None:
        super().__init__(config, softmax_scale=math.sqrt(config.d_head))

    def heads(self, qkv: QKV, rope: Rope | None) -> Heads:
        return rotary(qkv, rope, normalized=True)


class AnGPTMLP(MLP):
    """nu_acf W_down (u * SiLU(sqrt(d) v)) with u = nu_uv W_u h and v = nu_uv W_v h.

    nu_uv = sqrt(d / d_mlp) gives u and v length 1. The numbers that SiLU reads, nu_uv times a normal one, come out with
    root mean square 1 / nu_acf. W_down sums d_mlp directions, whose squared weights add to 1, so it needs no constant.
    """

    def __init__(self, config: AnGPTConfig) -> None:
        super().__init__(config)
        self.sqrt_d = math.sqrt(config.d_model)
        self.nu_uv = math.sqrt(config.d_model / self.d_mlp)
        self.nu_acf = 1 / root_mean_square_of_silu(self.nu_uv)

    def forward(self, x: Tensor, norm_ffn: Map = identity) -> Tensor:
        """x `(B, T, d_model)` -> the same shape. u has the factor sqrt(d) of v too, until W_down."""
        return super().forward(self.nu_uv * self.sqrt_d * x, norm_ffn) * (self.nu_acf / self.sqrt_d)


def root_mean_square_of_silu(deviation: float) -> float:
    """sqrt(E SiLU(x)^2) for x from N(0, deviation^2), as a sum over a fine grid."""
    grid = [n / 100 for n in range(-1200, 1201)]
    density = [math.exp(-z * z / 2) for z in grid]
    silu = [deviation * z * (1 + math.tanh(deviation * z / 2)) / 2 for z in grid]
    return math.sqrt(sum(p * y * y for p, y in zip(density, silu, strict=True)) / sum(density))


class AnGPT(Decoder):
    """Logits = s_z (E_output h), where h is the output of the last block."""

    decays = False  # the rows have a largest length instead
    config: AnGPTConfig

    def __init__(self, config: AnGPTConfig) -> None:
        super().__init__(config, (AnGPTBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.n_outputs, config.s_z, config)

    def head(self, h: Tensor) -> Head:
        return Head(h, self.unembedding, self.s_z())

    def init_std(self, path: str) -> float:
        """Before the projection, the same for all matrices."""
        return 1 / math.sqrt(self.config.d_model)


Model = AnGPT  # what build_model builds
