"""Log lines that appear once in a process, however often they are logged, also by code that torch.compile traces."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_said: set[str] = set()
_quiet = False  # inside of `saying_nothing`


def called_at_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: torch.compile calls the function once and takes its answer as a constant. This is the mark of
    `torch.compiler.assume_constant_result`, which imports torch._dynamo to set it. The import takes as long as torch's
    own, also where nothing is compiled."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Models call this while torch.compile traces them. functools.cache would not do: torch.compile skips the cache and
# traces the function inside.
@called_at_tracing
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
