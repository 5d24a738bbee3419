"""The optimizer's bf16 copies of fp32 matrices save the forward passes a cast."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ngpt_train.models.layers.linear import FusedLinear


@dataclass
class _Copy:
    values: Tensor  # (rows, d) bf16
    master: Tensor  # the fp32 matrix, detached; holding it keeps its memory from other tensors
    version: int  # torch's version count of the matrix when `values` was written


class WorkingCopies:
    """A bf16 copy of the matrix of each linear, lent to the linears during a training step.

    Outside of `lent` the linears have no copy, so that evaluation, checkpoints and code that changes a model need not
    know of them.

    A copy is valid while its matrix keeps its memory and torch's version count. torch does not count writes through
    `.data`, NumPy, a collective or its own fused optimizers. So a step uses the copies of an earlier step only if its
    caller promises that there was no such write.
    """

    def __init__(self, linears: Sequence[FusedLinear]) -> None:
        self.linears = list(linears)
        self._copies: dict[Tensor, _Copy] = {}

    @contextmanager
    def lent(self, untouched: bool) -> Iterator[None]:
        """While the body runs, each linear has its copy as `bf16_copy`.

        untouched: the caller promises that nothing has written to the matrices since the last step unseen by torch.
        Then valid copies are lent as they are; otherwise all are made anew.
        """
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
        copy = self._copies.get(matrix)
        valid = copy is not None and copy.master.is_set_to(matrix) and copy.version == matrix._version
        return copy.values if copy is not None and valid else None

    def declare_valid(self, matrix: Tensor, values: Tensor) -> None:
        """Makes `values` the copy of `matrix`, valid until torch counts the next write to `matrix`."""
        # A detached tensor shares the parameter's version count, but keeps its memory if the parameter gets another.
        self._copies[matrix] = _Copy(values, matrix.detach(), matrix._version)
