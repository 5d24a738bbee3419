"""Operations, and which implementation of them runs: `kernels=auto|triton|torch`.

An operation is a function whose body is its formula. A faster function, its twin, is registered below it.

    @operation("sphere_step")
    def sphere_step(h, x, alpha):
        return Norm(h + alpha * (Norm(x) - h))

    @sphere_step.twin
    def by_hand_or_on_triton(on_triton, h, x, alpha): ...

A caller reads the formula and gets the twin, which computes the same with gradients by hand or in a Triton kernel.
`sphere_step.formula` is the undecorated function: a twin's forward pass without Triton, the reference of tests.
"""

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ngpt_train.core.log import called_at_tracing, say_once

CHOICES = ("auto", "triton", "torch")
OLDEST = (8, 0)  # compute capability of the oldest GPUs that Triton's kernels run on: Ampere
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_choice = "auto"
# Kernels that do not run, whatever the choice, and why. A dict, not a set: of a dict torch.compile knows the keys that
# compiled code depends on, and compiles again only when one of these changes.
_off: dict[str, str] = {}
# `watched` sets it: it is given an operation's name, True if the Triton kernel runs, and the arguments.
_watch: Callable[[str, bool, tuple[Any, ...], dict[str, Any]], None] | None = None


class Operation(Generic[P, R]):
    """A formula. A call runs its twin."""

    def __init__(self, name: str, formula: Callable[P, R]) -> None:
        functools.update_wrapper(self, formula)
        self.name = name
        self.formula: Callable[..., Any] = formula
        self._twin: Callable[..., Any]
        self._unsupported: Callable[..., str | None] = lambda *_, **__: None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensors = float_tensors((*args, *kwargs.values()))
        on_triton = runs_on_triton(self.name, *tensors, unsupported=self._unsupported(*args, **kwargs))
        if _watch is not None:
            _watch(self.name, on_triton, args, kwargs)
        return cast(R, self._twin(on_triton, *args, **kwargs))

    def twin(self, function: F) -> F:
        """Registers the twin. Its first argument, before the formula's, is True if it runs on Triton."""
        self._twin = function
        return function

    def unsupported(self, function: F) -> F:
        """Registers a function of the arguments: the option that the Triton kernel does not support, for the log."""
        self._unsupported = function
        return function


def operation(name: str) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorates a formula. name: of its kernel, in `switch_off` and in the log."""
    return functools.partial(Operation, name)


@contextlib.contextmanager
def watched(watch: Callable[[str, bool, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside a `with`, each call of an operation first calls `watch`."""
    global _watch
    _watch = watch
    try:
        yield
    finally:
        _watch = None


def float_tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The floating-point tensors among the arguments and in their tuples, in order."""
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            yield argument
        elif isinstance(argument, tuple):
            yield from float_tensors(argument)


def choose(kernels: str) -> None:
    """Sets `kernels=` for this process. Raises ValueError for an unknown choice and where Triton cannot run."""
    global _choice
    if kernels not in CHOICES:
        raise ValueError(f"kernels={kernels}: allowed are {', '.join(CHOICES)}")
    if kernels == "triton" and (reason := why_no_triton()):
        raise ValueError(f"kernels=triton: {reason}. Use kernels=auto or kernels=torch")
    _choice = kernels


def switch_off(reasons: Mapping[str, str]) -> None:
    """Switches off the kernels of these names, and switches on all others: operations then run in plain PyTorch.
    reasons: by name, for the log. kernels/attention.py knows the names "attention" and "attention of documents"."""
    global _off
    _off = dict(reasons)


def is_off(operation: str) -> bool:
    """True if `switch_off` was given this name."""
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
    before = _choice, _off
    choose(kernels)
    if without is not None:
        switch_off(_off | {without: "it is left out"})
    try:
        yield
    finally:
        choose(before[0])
        switch_off(before[1])


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
    """True if Triton's interpreter runs the kernels in Python, on the CPU; only tests use it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on_triton(operation: str, *tensors: Tensor, unsupported: str | None = None) -> bool:
    """True if the Triton kernel of `operation` runs on these tensors, at least one. unsupported: an option that the
    kernel does not know. If it would run without that, or with another dtype, the log says so."""
    if _choice == "torch" or operation in _off:
        return False
    if _choice == "auto" and not (tensors[0].is_cuda and _gpu_suits()):
        return False
    if unsupported is None and any(tensor.dtype not in DTYPES for tensor in tensors):
        unsupported = f"{next(t.dtype for t in tensors if t.dtype not in DTYPES)}"
    if unsupported is not None:
        reason = f"because its kernel does not know {unsupported}"
        say_once(logging.WARNING, f"kernels: {operation} runs in plain PyTorch, {reason}")
    return unsupported is None


def say_without_kernel(operation: str, option: str, x: Tensor) -> None:
    """Says once that a formula replaces `operation`, whose Triton kernel would run on x without `option`."""
    runs_on_triton(operation, x, unsupported=option)


@called_at_tracing
def _gpu_suits() -> bool:
    return _why_auto_takes_torch() is None


@functools.cache  # every call of an operation asks, and finding packages takes longer than most operations
def _why_auto_takes_torch() -> str | None:
    """Why kernels=auto does not take Triton on a GPU; None where it does."""
    return "Triton's interpreter is for tests" if interpreted() else why_no_triton()
