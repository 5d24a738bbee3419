"""The places of dropout in a model, and their seeds.

A forward pass in training takes the seeds of its rows, int64 `(B,)` (kernels/dropout.py: row_seeds). The model derives
seeds for each of its parts and blocks, outside of compiled code, so that one graph fits all blocks and steps. While a
part or a block runs, inside `seeded`, its dropouts read its seeds. Each dropout of a block has a number, its place, and
derives its own seeds from it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from ngpt_train.core.errors import ConfigError
from ngpt_train.kernels.dropout import dropout, mix, numbers

# The seeds (B,) of the part of a model that runs; None: nothing is dropped. Compiled code takes them as an input.
_seeds: Tensor | None = None


@contextmanager
def seeded(seeds: Tensor | None) -> Iterator[None]:
    """Inside a `with`, dropout has these seeds `(B,)`, or with None drops nothing."""
    global _seeds
    before, _seeds = _seeds, seeds
    try:
        yield
    finally:
        _seeds = before


def seeds_now() -> Tensor | None:
    """The seeds `(B,)` of the part that runs."""
    return _seeds


def with_seeds(seeds: Tensor | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) with these seeds. A block that is computed again in the backward pass gets its own so."""
    with seeded(seeds):
        return function(*arguments)


class Dropout(nn.Module):
    """Sets elements of x `(B, ...)` to 0 with probability p and divides the others by 1 - p, where there are seeds."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.place = 0  # number_places sets it

    def seeds(self) -> Tensor | None:
        """The seeds `(B,)` of this place; None where nothing is dropped."""
        seeds = seeds_now()
        return None if seeds is None or self.p == 0 else mix(seeds ^ self.place)

    def forward(self, x: Tensor) -> Tensor:
        seeds = self.seeds()
        return x if seeds is None else dropout(x, self.p, seeds)


def number_places(blocks: Iterable[nn.Module]) -> None:
    """Gives every Dropout of a block a number of its own, the same in every block of a kind. Raises ConfigError for a
    plug-in's block that waits for seeds, as blocks did earlier: it would drop nothing."""
    for block in blocks:
        if "seeds" in inspect.signature(block.forward).parameters:
            raise ConfigError(
                f"{type(block).__module__}: {type(block).__name__}.forward takes seeds, which blocks no longer get\n"
                "  Remove the argument: Dropout and Attention find the seeds (docs/add_an_architecture.md)"
            )
        places = (module for module in block.modules() if isinstance(module, Dropout))
        for number, module in enumerate(places):
            module.place = number


def seeds_of_parts(seeds: Tensor | None, n: int) -> Sequence[Tensor | None]:
    """The seeds `(B,)` of each of n parts, from the seeds of the whole; without seeds None for each."""
    return [None] * n if seeds is None else numbers(seeds, n).T.contiguous().unbind()


def each_with_seeds(blocks: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, AbstractContextManager[None]]]:
    """Each block, with a context that gives dropout the block's seeds."""
    blocks = list(blocks)
    for block, seeds in zip(blocks, seeds_of_parts(seeds_now(), len(blocks)), strict=True):
        yield block, seeded(seeds)
