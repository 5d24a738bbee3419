"""An operation is a function whose body is its formula. A faster function, its twin, is registered below it.

    @operation("sphere_step")
    def sphere_step(h, x, alpha):
        return Norm(h + alpha * (Norm(x) - h))

    @sphere_step.twin
    def by_hand_or_on_triton(on_triton, h, x, alpha): ...

A caller reads the formula and gets the twin, which computes the same with gradients by hand or in a Triton kernel.
`sphere_step.formula` is the undecorated function, the reference of tests and benchmarks.
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
    """A formula decorated with `operation`. The last four are decorators of functions that take its arguments."""

    formula: Callable[..., Any]
    # Registers the twin. Its first argument, before those of the formula, is whether it is to run on Triton.
    twin: Callable[[F], F]
    # Registers the condition under which the twin runs without Triton; without a condition it always does.
    by_hand_where: Callable[[F], F]
    # Registers a function that returns, in a word for the log, what the Triton kernel does not support; else None.
    unsupported: Callable[[F], F]
    # Registers a function that raises ValueError for arguments that do not fit. It runs first.
    check: Callable[[F], F]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _Registered:
    """The functions that are registered for an operation."""

    twin: Callable[..., Any] | None = None
    by_hand_where: Callable[..., bool] | None = None
    unsupported: Callable[..., str | None] | None = None
    check: Callable[..., None] | None = None

    def decorator(self, attribute: str) -> Callable[[F], F]:
        """A decorator that registers a function as `attribute` and returns it unchanged."""

        def register(function: F) -> F:
            setattr(self, attribute, function)
            return function

        return register


def operation(name: str | None) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorates a formula so that a call runs its twin where that is faster.

    name: of the operation in `kernels.dispatch` and in the log; None where there is no Triton kernel, or where the twin
    itself asks `runs_on_triton`.
    """

    def decorate(formula: Callable[P, R]) -> Operation[P, R]:
        registered = _Registered()

        @functools.wraps(formula)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if registered.check is not None:
                registered.check(*args, **kwargs)
            option = None if registered.unsupported is None else registered.unsupported(*args, **kwargs)
            on_triton = name is not None and kernel_runs(name, option, args, kwargs)
            if _watch is not None:
                _watch(formula.__name__, on_triton, args, kwargs)
            if on_triton or registered.by_hand_where is None or registered.by_hand_where(*args, **kwargs):
                assert registered.twin is not None
                return cast(R, registered.twin(on_triton, *args, **kwargs))
            return formula(*args, **kwargs)

        made = cast(Operation[P, R], run)
        made.formula = formula
        for attribute in ("twin", "by_hand_where", "unsupported", "check"):
            setattr(made, attribute, registered.decorator(attribute))
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


def without_kernel(name: str, option: str | Callable[..., str | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a formula that stands in for the operation `name`, whose Triton kernel does not support an option.

    The log says so once, if the kernel would run without that option. option: a word for the log, or a function of the
    formula's arguments that returns one, or None where no such option is set.
    """

    def decorate(formula: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(formula)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            chosen = option(*args, **kwargs) if callable(option) else option
            if chosen is not None:
                kernel_runs(name, chosen, args, kwargs)
            return formula(*args, **kwargs)

        return run

    return decorate


def kernel_runs(name: str, option: str | None, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the Triton kernel of `name` runs on these arguments; not if it does not support `option`."""
    return runs_on_triton(name, *float_tensors((*args, *kwargs.values())), unsupported=option)


def float_tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The floating-point tensors among the arguments and in their tuples, in order."""
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            yield argument
        elif isinstance(argument, tuple):
            yield from float_tensors(argument)
