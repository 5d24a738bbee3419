"""What is said once, however often it is so."""

import logging

import torch

logger = logging.getLogger(__name__)

_said: set[str] = set()


# Called while a model is compiled, too, and no part of what is compiled. (A functools.cache would be passed over there,
# and its function compiled.)
@torch.compiler.assume_constant_result
def say_once(level: int, line: str) -> None:
    if line not in _said:
        _said.add(line)
        logger.log(level, "%s", line)
