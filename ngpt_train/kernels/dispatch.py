"""Which implementation of a fused operation runs: `kernels=auto|triton|torch`."""

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ngpt_train.core.log import say_once

CHOICES = ("auto", "triton", "torch")
OLDEST = (8, 0)  # compute capability of the oldest GPUs that Triton's kernels run on: Ampere
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_choice = "auto"
# Operations whose Triton kernels do not run, whatever the choice. A dict, not a set: of a dict torch.compile knows the
# keys that compiled code depends on, and compiles again only when one of these changes.
_without: dict[str, bool] = {}
_off: dict[str, str] = {}  # kernels that this machine is not to run, and why: `switch_off`


def choose(kernels: str) -> None:
    """Sets `kernels=` for this process. Raises ValueError for an unknown choice and where Triton cannot run."""
    global _choice
    if kernels not in CHOICES:
        raise ValueError(f"kernels={kernels}: allowed are {', '.join(CHOICES)}")
    if kernels == "triton" and (reason := why_no_triton()):
        raise ValueError(f"kernels=triton: {reason}. Use kernels=auto or kernels=torch")
    _choice = kernels


def switch_off(reasons: Mapping[str, str]) -> None:
    """Has the operations of these names run in plain PyTorch from now on, whatever else is chosen. An empty mapping
    switches all on again.

    reasons: for the log. Also known are "attention" and "attention of documents" (kernels/attention.py).
    """
    global _off
    _off = dict(reasons)


def is_off(operation: str) -> bool:
    """Whether `switch_off` was given this name."""
    return operation in _off


def described(device: torch.device) -> str:
    """A line for the log: which kernels run on that device, and why."""
    reason = None
    if _choice == "auto":
        reason = _why_auto_takes_torch() if device.type == "cuda" else f"this runs on a {device.type.upper()}"
    runs = "plain PyTorch" if reason or _choice == "torch" else "Triton's where there are some"
    without = f", without {', '.join(_off)}" if _off and runs != "plain PyTorch" else ""
    return f"kernels: {runs}{without} (kernels={_choice}{': ' + reason if reason else ''})"


@contextlib.contextmanager
def chosen(kernels: str, without: str | None = None) -> Iterator[None]:
    """Sets `kernels=` inside a `with`. without: the name of an operation that runs in plain PyTorch all the same."""
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
    """Why Triton's kernels cannot run in this process; None where they can."""
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
    """Whether Triton's interpreter runs the kernels in Python, on the CPU; only tests use it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on_triton(operation: str, *tensors: Tensor, unsupported: str | None = None) -> bool:
    """Whether the Triton kernel of `operation` runs on these tensors, of which there is at least one.

    unsupported: an option that the kernel does not support. If the kernel would run without that option, or with
    another dtype, the log says so once.
    """
    if _choice == "torch" or operation in _without or operation in _off:
        return False
    if _choice == "auto" and not (tensors[0].is_cuda and _gpu_suits()):
        return False
    if unsupported is None and any(tensor.dtype not in DTYPES for tensor in tensors):
        unsupported = f"{next(t.dtype for t in tensors if t.dtype not in DTYPES)}"
    if unsupported is not None:
        reason = f"because its kernel does not know {unsupported}"
        say_once(logging.WARNING, f"kernels: {operation} runs in plain PyTorch, {reason}")
    return unsupported is None


def say_without_kernel(operation: str, option: str, *tensors: Tensor) -> None:
    """Says once that a formula stands in for `operation`, whose Triton kernel would run on these tensors without
    `option`."""
    runs_on_triton(operation, *tensors, unsupported=option)


# torch.compile calls this while it traces a model, and takes the answer as a constant.
@torch.compiler.assume_constant_result
def _gpu_suits() -> bool:
    return _why_auto_takes_torch() is None


@functools.cache  # every call of an operation asks, and finding packages takes longer than most operations
def _why_auto_takes_torch() -> str | None:
    """Why kernels=auto does not take Triton on a GPU; None where it does."""
    return "Triton's interpreter is for tests" if interpreted() else why_no_triton()
