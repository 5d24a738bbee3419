"""bf16 copies of fp32 matrices, written by the optimizer, so that no forward pass has to cast them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ngpt_train.models.layers.linear import FusedLinear


@dataclass
class _Copy:
    values: Tensor  # (rows, d) bf16
    master: Tensor  # where it was copied from; being held, that memory cannot become another tensor's
    version: int


class WorkingCopies:
    """A copy of the matrix of each of `linears`, there for models during a step and at no other time.

    Outside of `in_use` parameters are as if there were no copies: whoever evaluates, saves or changes a model meets
    nothing of them. A copy counts as long as its master has the memory and torch's version count that it had when the
    copy was written. torch does not count what is written through `.data`, NumPy, a collective or its own fused
    optimizers; that is why copies of an earlier step are used only where the caller knows of none of these.
    """

    def __init__(self, linears: Sequence[FusedLinear]) -> None:
        self.linears = list(linears)
        self._copies: dict[Tensor, _Copy] = {}

    @contextmanager
    def in_use(self, untouched: bool) -> Iterator[None]:
        """Lets the products find the copies. untouched: of those that still count none is made anew."""
        try:
            for linear in self.linears:
                matrix = linear.matrix
                copy = self.current(matrix) if untouched else None
                if copy is None:
                    copy = matrix.detach().to(torch.bfloat16)
                    self.written(matrix, copy)
                linear.bf16_copy = copy
            yield
        finally:
            for linear in self.linears:
                linear.bf16_copy = None

    def current(self, matrix: Tensor) -> Tensor | None:
        """The copy of `matrix`, if there is one and it counts."""
        copy = self._copies.get(matrix)
        counts = copy is not None and copy.master.is_set_to(matrix) and copy.version == matrix._version
        return copy.values if copy is not None and counts else None

    def written(self, matrix: Tensor, values: Tensor) -> None:
        """`values` are those of `matrix` from now on, until something else is written to it."""
        # Detached it still counts with the parameter, but stays where it is if the parameter gets other memory.
        self._copies[matrix] = _Copy(values, matrix.detach(), matrix._version)
