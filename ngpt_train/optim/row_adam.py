"""Adam that takes matrices row by row, and leaves each row where the projection would."""

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
    """torch's fused Adam or AdamW, with another implementation of a matrix's step: kernels/adam.py.

    Its state and groups are the parent's, name for name, so that each resumes from what the other saved. What the
    parent does not know is therefore no key of a group: `unit_rows` says for each group whether rows are divided by
    their length after the step. A group holds matrices or vectors; rows of vectors mean nothing.

    No collective: FSDP2 shards rows whole, and a rank moves those that it holds. As torch's fused optimizers, it
    divides gradients by the attribute `grad_scale` and changes nothing where `found_inf` is 1.

    Of the matrices of `copied` it writes bf16 copies as it goes, from the first time on that `copies` were in use.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        unit_rows: Sequence[bool],
        copied: Sequence[FusedLinear] = (),
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.copies = WorkingCopies(copied)
        self.unit_rows = list(unit_rows)
        for group, unit in zip(self.param_groups, self.unit_rows, strict=True):
            matrices = {parameter.ndim == 2 for parameter in group["params"]}
            assert len(matrices) <= 1, "matrices and vectors in one group"
            assert not unit or matrices == {True}
            assert group["decoupled_weight_decay"] or not group["weight_decay"]  # the kernel knows AdamW's alone

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
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
            # A list: of a single tensor torch would ask the device for the number.
            torch._foreach_add_(steps, 1 if found_inf is None else [1 - found_inf] * len(steps))
            for weight, gradient, exp_avg, exp_avg_sq, step in zip(
                parameters, gradients, exp_avgs, exp_avg_sqs, steps, strict=True
            ):
                # A skipped step leaves a copy as it is: one that does not count must not seem written.
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
                    self.copies.written(weight, copy)


def local_rows(matrix: Tensor) -> Tensor:
    """The rows of `matrix` `(rows, d)` that this rank holds; there may be none."""
    return matrix.to_local() if isinstance(matrix, DTensor) else matrix
