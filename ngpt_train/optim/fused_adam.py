"""torch's Adam and AdamW in their fused form, one pass over memory, on CPUs too; the base of the optimizers here."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Adam):
    """torch.optim.Adam of `groups`, torch's parameter groups; with decoupled_weight_decay=True it is AdamW.

    torch wraps its optimizers' methods for torch.compile. The first call of a wrapper imports the compiler, which takes
    as long as importing torch. No optimizer is compiled here, so the methods below are the wrapped ones.

    As in torch's fused optimizers, a step divides the gradients by `grad_scale`, and with `found_inf` 1 it changes
    nothing; both are 0-dim fp32 on the device. State and groups of a subclass have the keys of torch's Adam, so that a
    checkpoint of one loads into another.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, fused=True, **options)

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))

    def moved_by_torch(self, parameter: Tensor) -> bool:
        """Whether torch's step moves this parameter. A subclass moves the others itself."""
        return True

    def _init_group(self, group: dict[str, Any], *found: list[Tensor]) -> bool:
        parameters = [parameter for parameter in group["params"] if self.moved_by_torch(parameter)]
        return super()._init_group(group | {"params": parameters}, *found)

    def states(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Parameter, gradient, exp_avg, exp_avg_sq and step of each of the group's `parameters` that has a gradient."""
        lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])  # the fifth: torch's maxima of amsgrad
        super()._init_group(group | {"params": parameters}, *lists)
        *tensors, _, steps = lists
        return list(zip(*tensors, steps, strict=True))
