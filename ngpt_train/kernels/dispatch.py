"""Which implementation of a fused operation runs: `kernels=auto|triton|torch`."""

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from ngpt_train.core.log import say_once

CHOICES = ("auto", "triton", "torch")
OLDEST = (8, 0)  # compute capability: Ampere
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_choice = "auto"
# Operations whose kernels do not run, whatever the choice. Of a dict's keys, unlike a set's, torch.compile knows which
# the compiled code depends on, and compiles again for those only.
_without: dict[str, bool] = {}


def choose(kernels: str) -> None:
    """For this process, from now on. Raises ValueError."""
    global _choice
    if kernels not in CHOICES:
        raise ValueError(f"kernels={kernels}: allowed are {', '.join(CHOICES)}")
    if kernels == "triton" and (reason := why_no_triton()):
        raise ValueError(f"kernels=triton: {reason}. Use kernels=auto or kernels=torch")
    _choice = kernels


def described(device: torch.device) -> str:
    """What runs on that device, and why: a line for the log."""
    reason = None
    if _choice == "auto":
        reason = _why_not_by_itself() if device.type == "cuda" else f"this runs on a {device.type.upper()}"
    runs = "plain PyTorch" if reason or _choice == "torch" else "Triton's where there are some"
    return f"kernels: {runs} (kernels={_choice}{': ' + reason if reason else ''})"


@contextlib.contextmanager
def chosen(kernels: str, without: str | None = None) -> Iterator[None]:
    """As `choose`, for a while; without: an operation, as `runs_on_triton` knows it, that runs in plain PyTorch."""
    global _without
    before = _choice, _without
    choose(kernels)
    _without = {} if without is None else {without: True}
    try:
        yield
    finally:
        _without = before[1]
        choose(before[0])


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
    if _choice == "torch" or operation in _without:
        return False
    if _choice == "auto" and not (tensors[0].is_cuda and _gpu_suits()):
        return False
    if unsupported is None and any(tensor.dtype not in DTYPES for tensor in tensors):
        unsupported = f"{next(t.dtype for t in tensors if t.dtype not in DTYPES)}"
    if unsupported is not None:
        reason = f"because its kernel does not know {unsupported}"
        say_once(logging.WARNING, f"kernels: {operation} runs in plain PyTorch, {reason}")
    return unsupported is None


# Asked while a model is compiled, too, and no part of what is compiled.
@torch.compiler.assume_constant_result
def _gpu_suits() -> bool:
    return _why_not_by_itself() is None


@functools.cache  # every operation asks, and finding packages takes longer than most of them
def _why_not_by_itself() -> str | None:
    return "Triton's interpreter is for tests" if interpreted() else why_no_triton()
