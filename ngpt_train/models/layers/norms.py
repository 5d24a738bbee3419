"""Norms of one token, where they stand in a block, and the projection of the rows of matrices.

Statistics and products are in fp32 (fp64 for an fp64 model); the result has x's dtype.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.core.constants import Constraint
from ngpt_train.kernels.norm import FLOORS, at_least_fp32, rms_norm
from ngpt_train.models.rank_rows import local_rows

Map = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def residual(
    x: Tensor,
    f: Map,
    drop: Map,
    *,
    norm_in: Map = identity,
    norm_out: Map = identity,
    norm_sum: Map = identity,
    lambda_: Map = identity,
    gamma: Map = identity,
) -> Tensor:
    """norm_sum(lambda x + drop(gamma norm_out(f(norm_in(x))))): x and the result `(B, T, d_model)`.

    f: the sublayer, attention or MLP. drop: dropout of the whole addend. lambda_: ResScale's. gamma: LayerScale's. An
    architecture has one or two of the norms; the others are the identity:

        pre         x + f(norm_in(x))               Pre-LN (Xiong et al. 2020): GPT, eq. 4 and 5 of nGPT's paper
        post        norm_sum(x + f(x))              Post-LN (Vaswani et al. 2017)
        peri        x + norm_out(f(norm_in(x)))     Sandwich-LN (CogView, Ding et al. 2021), Peri-LN (Kim et al. 2025)
        reordered   x + norm_out(f(x))              OLMo 2 (2024)
    """
    return norm_sum(lambda_(x) + drop(gamma(norm_out(f(norm_in(x))))))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension."""

    def __init__(self, size: int, eps: float, gain: bool = True) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.gain = nn.Parameter(torch.ones(size)) if gain else None

    def reset_parameters(self) -> None:
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(at_least_fp32(x), self.gain, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * gain + bias over the last dimension.

    Without gain, without bias or without both it is notes 8 to 10 of NormFormer's Table 8.
    """

    def __init__(self, size: int, eps: float, gain: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.gain = nn.Parameter(torch.ones(size)) if gain else None
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def reset_parameters(self) -> None:
        if self.gain is not None:
            nn.init.ones_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(at_least_fp32(x), (self.size,), self.gain, self.bias, self.eps).to(x.dtype)


class CogViewNorm(LayerNorm):
    """LN(x / max(x)) of CogView (Ding et al. 2021, section 2.4), where max(x) is the largest |x_i| of the token.

    LayerNorm does not see the length of its input but for eps, which is here relative to max(x).
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        largest = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
        return super().forward(wide / largest).to(x.dtype)


class DyT(nn.Module):
    """Dynamic tanh: gain * tanh(alpha x) + bias, with alpha `(1,)` (Zhu et al. 2025)."""

    def __init__(self, size: int, init_alpha: float) -> None:
        super().__init__()
        self.init_alpha = init_alpha
        self.alpha = nn.Parameter(torch.full((1,), init_alpha))
        self.gain, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * torch.tanh(self.alpha * x) + self.bias).to(x.dtype)


class Derf(DyT):
    """Dynamic erf: gain * erf(alpha x + shift) + bias, with alpha and shift `(1,)` (arXiv 2512.10938)."""

    def __init__(self, size: int, init_alpha: float) -> None:
        super().__init__(size, init_alpha)
        self.shift = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * torch.erf(self.alpha * x + self.shift) + self.bias).to(x.dtype)


class LearnedScale(nn.Module):
    """Learned factors `(size,)` that start at `init`: HeadScale's gamma, ResScale's lambda, LayerScale's weights."""

    def __init__(self, size: int, init: float = 1.0) -> None:
        super().__init__()
        self.init = init
        self.gain = nn.Parameter(torch.full((size,), init))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.init)

    def forward(self, x: Tensor) -> Tensor:
        """gain * x over the last dimension, in x's dtype."""
        return (self.gain * x).to(x.dtype)


@torch.no_grad()
def project_rows_(matrix: Tensor, constraint: Constraint, skipped: Tensor | None = None) -> None:
    """Divides every row of `matrix` `(rows, d_model)` by its length, in place; in the ball only the longer ones.
    constraint: "sphere" or "ball". skipped: 0-dim bool; if it is true, no bit of the matrix changes. FSDP2 shards by
    whole rows, so each rank projects the rows of its own shard, without communication."""
    rows = local_rows(matrix)
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min_(FLOORS[constraint])
    # A skipped step divides by 1: dividing a row of length 1 by its computed length could change it by a rounding.
    rows.div_(length if skipped is None else length.masked_fill_(skipped, 1.0))
