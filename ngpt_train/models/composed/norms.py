"""The norms of model.norm, and one forward pass through those of a block.

Statistics and products are in fp32 (fp64 for an fp64 model); the result has x's dtype.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngpt_train.kernels.norm import at_least_fp32
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.composed.placement import Map
from ngpt_train.models.layers.norms import LayerNorm, RMSNorm
from ngpt_train.models.powernorm.model import NORMS as OVER_BATCH
from ngpt_train.models.powernorm.running_statistics import BatchStatistics, NormOverBatch, RunningStatistics


def norm_of(config: ComposedConfig, size: int) -> nn.Module:
    """The norm of config.norm over the last dimension of x `(..., size)`. Only PowerNorm's four have layer-scale."""
    if config.norm_over_batch or (config.norm == "layer" and config.group_scaling):
        return OVER_BATCH[config.norm](size, config)
    if config.norm == "dyt":
        return DyT(size, config.dyt_alpha)
    return PER_TOKEN[config.norm](size, config.norm_eps)


class LayerNormWithout(nn.Module):
    """LayerNorm whose gain is 1, whose bias is 0, or both: notes 8 to 10 of NormFormer's Table 8."""

    def __init__(self, size: int, eps: float, gain: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.gain = nn.Parameter(torch.empty(size)) if gain else None
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.reset_parameters()

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
        wide = x.to(self.gain.dtype)
        largest = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
        return super().forward(wide / largest).to(x.dtype)


class DyT(nn.Module):
    """Dynamic tanh: gain * tanh(alpha x) + bias, with alpha `(1,)` (Zhu et al. 2025)."""

    def __init__(self, size: int, init_alpha: float) -> None:
        super().__init__()
        self.init_alpha = init_alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.gain = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.init_alpha)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * torch.tanh(self.alpha * x) + self.bias).to(x.dtype)


PER_TOKEN: dict[str, Callable[[int, float], nn.Module]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "layer_no_bias": partial(LayerNormWithout, gain=True),
    "layer_no_gain": partial(LayerNormWithout, bias=True),
    "layer_plain": LayerNormWithout,
    "cogview": CogViewNorm,
}


class NormPass:
    """A forward pass through the norms of a block: those over the batch read `running`, and their statistics of the
    batch are kept. Both are in the order of the norms' `place`.

    valid `(B, T)` is false for padding; None: there is none.
    """

    def __init__(self, valid: Tensor | None, running: Sequence[RunningStatistics | None]) -> None:
        self.valid, self.running = valid, running
        self.batches: list[BatchStatistics | None] = [None] * len(running)

    def __call__(self, norm: nn.Module) -> Map:
        """`norm` as a function of x alone."""
        return partial(self._over_batch, norm) if isinstance(norm, NormOverBatch) else norm

    def _over_batch(self, norm: NormOverBatch, x: Tensor) -> Tensor:
        y, self.batches[norm.place] = norm(x, self.valid, self.running[norm.place])
        return y
