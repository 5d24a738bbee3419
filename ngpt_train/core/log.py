"""Log lines that appear once in a process, however often they are logged, also by models that torch.compile traces."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

logger = logging.getLogger(__name__)

_said: set[str] = set()
_quiet = False  # inside of `saying_nothing`


F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """Has torch.compile call `function` while it traces, and take the result as a constant.

    torch.compiler.assume_constant_result does the same, after an import of torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# functools.cache would not do: torch.compile skips the cache and traces the function inside.
@constant_when_traced
def say_once(level: int, line: str) -> None:
    """Logs `line` at `level` (one of `logging`'s) unless this process has logged it before."""
    if not _quiet and line not in _said:
        _said.add(line)
        logger.log(level, "%s", line)


@contextlib.contextmanager
def saying_nothing() -> Iterator[None]:
    """Inside, `say_once` logs nothing: a model runs to be looked at, not to train."""
    global _quiet
    before, _quiet = _quiet, True
    try:
        yield
    finally:
        _quiet = before
