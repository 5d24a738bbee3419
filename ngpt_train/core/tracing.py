"""Functions that torch.compile calls while it traces a model, instead of tracing them."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def called_at_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: torch.compile calls the function once and takes its answer as a constant.

    This is the mark of `torch.compiler.assume_constant_result`, which imports torch._dynamo to set it. The import takes
    as long as torch itself, in every command.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
