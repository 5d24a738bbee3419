"""Batch statistics of norms when the rows of a batch are spread over ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ngpt_train.distributed.world import World
from ngpt_train.models import Decoder


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks. Its gradient is also summed over ranks, because the input of each rank changes every loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def synchronise_statistics(model: nn.Module) -> None:
    """Makes norms over the batch take their statistics over the rows of all ranks.

    Such a norm has an attribute `over_ranks`, a function that sums over ranks. Each forward and backward pass is then
    collective.
    """
    for module in model.modules():
        if hasattr(module, "over_ranks"):
            setattr(module, "over_ranks", _SumOverRanks.apply)  # noqa: B010 (types: a Module has no such attribute)


@contextmanager
def averaged_statistics(model: Decoder, world: World) -> Iterator[None]:
    """Inside, running statistics are means over ranks. Afterwards they are the rank's own. A collective call."""
    own = {name: value.clone() for name, value in model.statistics().items()}
    for value in model.statistics().values():
        value.copy_(world.sum_(value.clone()) / world.size)
    try:
        yield
    finally:
        for name, value in model.statistics().items():
            value.copy_(own[name])
