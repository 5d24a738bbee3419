"""Log lines that appear once in a process, however often they are logged."""

import contextlib
import logging
from collections.abc import Iterator

from ngpt_train.core.tracing import called_at_tracing

logger = logging.getLogger(__name__)

_said: set[str] = set()
_quiet = False  # inside of `saying_nothing`


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
