"""Log lines that appear once in a process, however often they are logged."""

import logging

import torch

logger = logging.getLogger(__name__)

_said: set[str] = set()


# Models call this while torch.compile traces them. The decorator makes torch.compile call the function at that time and
# leave it out of the graph. functools.cache would not do: torch.compile skips the cache and traces the function inside.
@torch.compiler.assume_constant_result
def say_once(level: int, line: str) -> None:
    """Logs `line` at `level` (one of `logging`'s) unless this process has logged it before."""
    if line not in _said:
        _said.add(line)
        logger.log(level, "%s", line)
