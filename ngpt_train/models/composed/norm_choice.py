"""The norm that model.norm chooses."""

from collections.abc import Callable
from functools import partial

from torch import nn

from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.layers.norms import CogViewNorm, DyT, LayerNorm, RMSNorm
from ngpt_train.models.powernorm.model import NORMS as OVER_BATCH

PER_TOKEN: dict[str, Callable[[int, float], nn.Module]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "layer_no_bias": partial(LayerNorm, bias=False),
    "layer_no_gain": partial(LayerNorm, gain=False),
    "layer_plain": partial(LayerNorm, gain=False, bias=False),
    "cogview": CogViewNorm,
}


def norm_of(config: ComposedConfig, size: int) -> nn.Module:
    """The norm of config.norm over the last dimension of x `(..., size)`. Only PowerNorm's four have layer-scale."""
    if config.norm_over_batch or (config.norm == "layer" and config.group_scaling):
        return OVER_BATCH[config.norm](size, config)
    if config.norm == "dyt":
        return DyT(size, config.dyt_alpha)
    return PER_TOKEN[config.norm](size, config.norm_eps)
