"""torch's Adam and AdamW in their fused form, one pass over memory, on CPUs too."""

import inspect
from typing import Any

import torch


class FusedAdam(torch.optim.Adam):
    """torch.optim.Adam of `groups`, torch's parameter groups; with decoupled_weight_decay=True it is AdamW.

    torch wraps its optimizers' methods for torch.compile. The first call of a wrapper imports the compiler, which takes
    as long as importing torch. No optimizer is compiled here, so the methods below are the wrapped ones.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, fused=True, **options)

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))
