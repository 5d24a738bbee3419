"""Which implementation of a fused operation runs: `kernels=auto|triton|torch`."""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHOICES = ("auto", "triton", "torch")
OLDEST = (8, 0)  # compute capability: Ampere
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_choice = "auto"
_said: set[str] = set()


def choose(kernels: str) -> None:
    """For this process, from now on. Raises ValueError."""
    global _choice
    if kernels not in CHOICES:
        raise ValueError(f"kernels={kernels}: allowed are {', '.join(CHOICES)}")
    if kernels == "triton" and (reason := why_no_triton()):
        raise ValueError(f"kernels=triton: {reason}. Use kernels=auto or kernels=torch")
    _choice = kernels


@contextlib.contextmanager
def chosen(kernels: str) -> Iterator[None]:
    """As `choose`, for a while."""
    before = _choice
    choose(kernels)
    try:
        yield
    finally:
        choose(before)


def why_no_triton() -> str | None:
    """What keeps Triton's kernels from running in this process; None where they run."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < OLDEST:
        return f"{torch.cuda.get_device_name()} is older than Ampere"
    return None


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on_triton(operation: str, *tensors: Tensor, unsupported: str | None = None) -> bool:
    """Whether the Triton kernel of `operation` takes these tensors.

    unsupported: an option of the architecture that it does not know. Where a kernel would run but for that, or for a
    dtype, the log says so, once.
    """
    if _choice == "torch" or (_choice == "auto" and not (tensors[0].is_cuda and _gpu_suits())):
        return False
    if unsupported is None and any(tensor.dtype not in DTYPES for tensor in tensors):
        unsupported = f"{next(t.dtype for t in tensors if t.dtype not in DTYPES)}"
    if unsupported is not None:
        _say_once(operation, unsupported)
    return unsupported is None


def falls_back(operation: str, tensor: Tensor, option: str) -> None:
    """For options of an architecture that have no kernel: the log says so, where one would run but for that."""
    runs_on_triton(operation, tensor, unsupported=option)


# Both are called while a model is compiled, too, and are no part of what is compiled. (A functools.cache would be
# passed over there, and its function compiled.)
@torch.compiler.assume_constant_result
def _gpu_suits() -> bool:
    return why_no_triton() is None and not interpreted()


@torch.compiler.assume_constant_result
def _say_once(operation: str, unsupported: str) -> None:
    line = f"kernels: {operation} runs in plain PyTorch, because its kernel does not know {unsupported}"
    if line not in _said:
        _said.add(line)
        logger.warning("%s", line)
