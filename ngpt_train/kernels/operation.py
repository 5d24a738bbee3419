"""An operation is a function whose body is its formula. A faster function, its twin, is registered below it.

    @operation("sphere_step")
    def sphere_step(h, x, alpha):
        return Norm(h + alpha * (Norm(x) - h))

    @sphere_step.twin
    def by_hand_or_on_triton(on_triton, h, x, alpha): ...

A caller reads the formula and gets the twin, which computes the same with gradients by hand or in a Triton kernel.
`sphere_step.formula` is the undecorated function: the forward pass of a twin without Triton, and the reference of tests
and benchmarks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from ngpt_train.kernels.dispatch import runs_on_triton

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

# Looks at a call of an operation: the name of its function, whether its Triton kernel runs, its arguments.
Watch = Callable[[str, bool, tuple[Any, ...], dict[str, Any]], None]
_watch: Watch | None = None  # of `watched`


class Operation(Protocol[P, R_co]):
    """A formula decorated with `operation`. The last two are decorators of functions that take its arguments."""

    formula: Callable[..., Any]
    # Registers the twin. Its first argument, before those of the formula, is whether it is to run on Triton.
    twin: Callable[[F], F]
    # Registers a function that returns, in a word for the log, what the Triton kernel does not support; else None.
    unsupported: Callable[[F], F]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _Registered:
    """The functions that are registered for an operation."""

    twin: Callable[..., Any]
    unsupported: Callable[..., str | None] | None = None

    def decorator(self, attribute: str) -> Callable[[F], F]:
        """A decorator that registers a function as `attribute` and returns it unchanged."""

        def register(function: F) -> F:
            setattr(self, attribute, function)
            return function

        return register


def operation(name: str | None) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorates a formula so that a call runs its twin.

    name: of the operation in `kernels.dispatch` and in the log; None where the twin itself asks `runs_on_triton`.
    """

    def decorate(formula: Callable[P, R]) -> Operation[P, R]:
        registered = _Registered()

        @functools.wraps(formula)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            option = None if registered.unsupported is None else registered.unsupported(*args, **kwargs)
            tensors = float_tensors((*args, *kwargs.values()))
            on_triton = name is not None and runs_on_triton(name, *tensors, unsupported=option)
            if _watch is not None:
                _watch(formula.__name__, on_triton, args, kwargs)
            return cast(R, registered.twin(on_triton, *args, **kwargs))

        made = cast(Operation[P, R], run)
        made.formula = formula
        made.twin, made.unsupported = registered.decorator("twin"), registered.decorator("unsupported")
        return made

    return decorate


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
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
