"""Adam whose step on a matrix also projects its rows onto the sphere, in the same pass over memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from ngpt_train.kernels.adam import adam_rows_
from ngpt_train.models.layers.linear import FusedLinear
from ngpt_train.optim.working_copies import WorkingCopies


class RowAdam(torch.optim.Adam):
    """torch's fused Adam or AdamW, but for a matrix, `(rows, d)`: its step is `kernels.adam.adam_rows_`.

    groups: torch's parameter groups; each has matrices alone or vectors alone. unit_rows: for each group, True if the
    rows of its matrices are divided by their length after the step. with_bf16_copy: linears with a bf16 copy, which the
    optimizer rewrites with each step; `self.copies` makes the copies when it first lends them. options: for
    torch.optim.Adam.

    State and groups have the keys of torch's Adam, so that a checkpoint of either loads into the other. That is why
    `unit_rows` is an attribute and no key of a group.

    There is no collective: FSDP2 shards matrices by whole rows, and a rank moves its own rows. As with torch's fused
    optimizers, gradients are divided by the attribute `grad_scale`, and if the attribute `found_inf` is 1 nothing
    changes.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        unit_rows: Sequence[bool],
        with_bf16_copy: Sequence[FusedLinear] = (),
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.copies = WorkingCopies(with_bf16_copy)
        self.unit_rows = list(unit_rows)
        for group, unit in zip(self.param_groups, self.unit_rows, strict=True):
            matrices = {parameter.ndim == 2 for parameter in group["params"]}
            assert len(matrices) <= 1, "matrices and vectors in one group"
            assert not unit or matrices == {True}
            assert group["decoupled_weight_decay"] or not group["weight_decay"]  # the kernel has AdamW's decay alone

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient, and their moments. Takes no closure."""
        assert closure is None
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, unit_rows in zip(self.param_groups, self.unit_rows, strict=True):
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            exp_avgs: list[Tensor] = []
            exp_avg_sqs: list[Tensor] = []
            steps: list[Tensor] = []
            self._init_group(group, parameters, gradients, exp_avgs, exp_avg_sqs, [], steps)
            if not parameters:
                continue
            lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            if parameters[0].ndim != 2:
                adam(
                    parameters,
                    gradients,
                    exp_avgs,
                    exp_avg_sqs,
                    [],
                    steps,
                    fused=True,
                    grad_scale=grad_scale,
                    found_inf=found_inf,
                    decoupled_weight_decay=group["decoupled_weight_decay"],
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=lr,
                    weight_decay=decay,
                    eps=eps,
                    maximize=False,
                )
                continue
            # A list of tensors: given one tensor, torch would wait for the device to read its value.
            torch._foreach_add_(steps, 1 if found_inf is None else [1 - found_inf] * len(steps))
            for weight, gradient, exp_avg, exp_avg_sq, step in zip(
                parameters, gradients, exp_avgs, exp_avg_sqs, steps, strict=True
            ):
                # Only a valid copy is written and then declared valid: in a skipped step the kernel leaves the copy as
                # it was, and an outdated copy must not become valid.
                copy = self.copies.current(weight)
                adam_rows_(
                    local_rows(weight),
                    local_rows(gradient),
                    local_rows(exp_avg),
                    local_rows(exp_avg_sq),
                    step,
                    lr,
                    beta1,
                    beta2,
                    eps,
                    decay,
                    unit_rows,
                    grad_scale,
                    found_inf,
                    copy=copy,
                )
                if copy is not None:
                    self.copies.declare_valid(weight, copy)


def local_rows(matrix: Tensor) -> Tensor:
    """This rank's rows of `matrix` `(rows, d)`; there may be none."""
    return matrix.to_local() if isinstance(matrix, DTensor) else matrix
