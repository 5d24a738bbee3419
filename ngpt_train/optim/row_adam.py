"""Adam whose step on a matrix also projects its rows, in the same pass over memory.

The pass may write a bf16 copy of the matrix too, which saves the next forward passes a cast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ngpt_train.core.constants import Constraint
from ngpt_train.kernels.adam import adam_rows_
from ngpt_train.models.layers.linear import FusedLinear
from ngpt_train.models.rank_rows import local_rows
from ngpt_train.optim.fused_adam import FusedAdam


class RowAdam(FusedAdam):
    """torch's fused Adam or AdamW, but for a matrix, `(rows, d)`: its step is `kernels.adam.adam_rows_`.

    groups: each has matrices alone or vectors alone. constraints: for each group, where the step leaves the rows of its
    matrices; an attribute and no key of a group, because torch's Adam has no such key. with_bf16_copy: linears with a
    bf16 copy, which the optimizer rewrites with each step; `self.copies` makes the copies when it first lends them.
    options: for torch.optim.Adam. FSDP2 shards matrices by whole rows, so a rank moves its own, without a collective.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        constraints: Sequence[Constraint],
        with_bf16_copy: Sequence[FusedLinear] = (),
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self.copies = WorkingCopies(with_bf16_copy)
        self.constraints = list(constraints)
        for group, constraint in zip(self.param_groups, self.constraints, strict=True):
            matrices = {parameter.ndim == 2 for parameter in group["params"]}
            assert len(matrices) <= 1, "matrices and vectors in one group"
            assert constraint == "free" or matrices == {True}
            assert group["decoupled_weight_decay"] or not group["weight_decay"]  # the kernel has AdamW's decay alone

    def moved_by_torch(self, parameter: Tensor) -> bool:
        return parameter.ndim != 2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient, and their moments. Takes no closure."""
        assert closure is None
        super().step()  # of the vectors
        grad_scale, found_inf = self.grad_scale, self.found_inf
        for group, constraint in zip(self.param_groups, self.constraints, strict=True):
            matrices = self.states(group, [parameter for parameter in group["params"] if parameter.ndim == 2])
            if not matrices:
                continue
            steps = [step for *_, step in matrices]
            # A list of tensors: given one tensor, torch would wait for the device to read its value.
            torch._foreach_add_(steps, 1 if found_inf is None else [1 - found_inf] * len(steps))
            lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            for weight, *of_weight, step in matrices:
                # Only a valid copy is written and then declared valid: in a skipped step the kernel leaves the copy as
                # it was, and an outdated copy must not become valid.
                copy = self.copies.current(weight)
                w, g, m, v = map(local_rows, (weight, *of_weight))
                adam_rows_(w, g, m, v, step, lr, beta1, beta2, eps, decay, constraint, grad_scale, found_inf, copy=copy)
                if copy is not None:
                    self.copies.declare_valid(weight, copy)


class WorkingCopies:
    """A bf16 copy of the matrix of each linear, lent to the linears during a training step.

    Outside of `lent` the linears have no copy, so that evaluation and checkpoints need not know of them.

    A copy is valid while its matrix keeps its memory and torch's version count. torch does not count writes through
    `.data`, NumPy, a collective or its own fused optimizers. So a step uses the copies of an earlier step only if its
    caller promises that there was no such write.
    """

    def __init__(self, linears: Sequence[FusedLinear]) -> None:
        self.linears = list(linears)
        # By matrix: its copy (rows, d) bf16; the matrix detached, which keeps its memory from other tensors; and
        # torch's version count of the matrix when the copy was written.
        self._copies: dict[Tensor, tuple[Tensor, Tensor, int]] = {}

    @contextmanager
    def lent(self, untouched: bool) -> Iterator[None]:
        """While the body runs, each linear has its copy as `bf16_copy`. untouched: the caller promises that nothing has
        written to the matrices since the last step unseen by torch; else all copies are made anew."""
        try:
            for linear in self.linears:
                matrix = linear.matrix
                copy = self.current(matrix) if untouched else None
                if copy is None:
                    copy = matrix.detach().to(torch.bfloat16)
                    self.declare_valid(matrix, copy)
                linear.bf16_copy = copy
            yield
        finally:
            for linear in self.linears:
                linear.bf16_copy = None

    def current(self, matrix: Tensor) -> Tensor | None:
        """The copy of `matrix`, `(rows, d)` bf16; None where there is no valid one."""
        if matrix not in self._copies:
            return None
        copy, master, version = self._copies[matrix]
        return copy if master.is_set_to(matrix) and version == matrix._version else None

    def declare_valid(self, matrix: Tensor, copy: Tensor) -> None:
        """Makes `copy` the copy of `matrix`, valid until torch counts the next write to `matrix`."""
        # A detached tensor shares the parameter's version count, but keeps its memory if the parameter gets another.
        self._copies[matrix] = copy, matrix.detach(), matrix._version
