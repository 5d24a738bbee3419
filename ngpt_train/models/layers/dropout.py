"""The places of dropout in a model, and their seeds.

A forward pass in training takes the seeds of its rows, int64 `(B,)` (kernels/dropout.py: row_seeds). The model derives
seeds for each of its parts and blocks, outside of compiled code, so that one graph fits all blocks and steps. In a
block each `Dropout` has a number, its place, from which it derives its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn

from ngpt_train.kernels.dropout import dropout, mix, numbers

Block = TypeVar("Block", bound=nn.Module)


class Dropout(nn.Module):
    """Sets elements of x `(B, ...)` to 0 with probability p and divides the others by 1 - p.

    It does so if it gets the seeds `(B,)` of its block; without seeds, as in evaluation, it returns x itself.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.place = 0  # number_places sets it

    def seeds_here(self, seeds: Tensor) -> Tensor:
        """The seeds `(B,)` of this place, from those of its block."""
        return mix(seeds ^ self.place)

    def forward(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        if seeds is None or self.p == 0:
            return x
        return dropout(x, self.p, self.seeds_here(seeds))


def number_places(blocks: Iterable[nn.Module]) -> None:
    """Gives every Dropout of a block a number of its own, the same in every block of a kind."""
    for block in blocks:
        places = (module for module in block.modules() if isinstance(module, Dropout))
        for number, module in enumerate(places):
            module.place = number


def seeds_of_parts(seeds: Tensor | None, n: int) -> Sequence[Tensor | None]:
    """The seeds `(B,)` of each of n parts, from those of the whole; None of None."""
    return [None] * n if seeds is None else numbers(seeds, n).T.contiguous().unbind()


def with_seeds(blocks: Iterable[Block], seeds: Tensor | None) -> Iterator[tuple[Block, Sequence[Tensor]]]:
    """Each block with its last argument, its seeds `(B,)`; without seeds it has no such argument."""
    blocks = list(blocks)
    for block, of_block in zip(blocks, seeds_of_parts(seeds, len(blocks)), strict=True):
        yield block, () if of_block is None else (of_block,)
