"""An operation is a function whose body is its formula. What computes the same faster is named below it.

    @operation("sphere_step")
    def sphere_step(h, x, alpha):
        return Norm(h + alpha * (Norm(x) - h))

    @sphere_step.twin
    def by_hand_or_on_triton(on_triton, h, x, alpha): ...

A caller sees the formula and gets the twin, where there is one for these tensors. `sphere_step.formula` is the function
as it is written, which tests and benchmarks take as their reference.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from ngpt_train.kernels.dispatch import runs_on_triton

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class Operation(Protocol[P, R_co]):
    """What `operation` makes of a formula. The last four decorate functions that take the formula's arguments."""

    formula: Callable[..., Any]
    # Computes the same, on Triton or with gradients by hand; takes before the arguments whether it is to run on Triton.
    twin: Callable[[F], F]
    # Whether the twin is the better one without Triton, too; without this function it is.
    by_hand_where: Callable[[F], F]
    # What of the arguments the kernel does not know, in a word for the log; None where it knows all.
    unknown: Callable[[F], F]
    # Raises ValueError for arguments that do not fit.
    check: Callable[[F], F]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class _Parts:
    """What an operation has beside its formula."""

    twin: Callable[..., Any] | None = None
    by_hand_where: Callable[..., bool] | None = None
    unknown: Callable[..., str | None] | None = None
    check: Callable[..., None] | None = None

    def taking(self, part: str) -> Callable[[F], F]:
        def take(function: F) -> F:
            setattr(self, part, function)
            return function

        return take


def operation(name: str | None) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """name: the operation's in `kernels.dispatch` and in the log; None where the twin has no kernel of Triton's, or
    asks for it itself."""

    def decorate(formula: Callable[P, R]) -> Operation[P, R]:
        parts = _Parts()

        @functools.wraps(formula)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if parts.check is not None:
                parts.check(*args, **kwargs)
            option = None if parts.unknown is None else parts.unknown(*args, **kwargs)
            on_triton = name is not None and asked(name, option, args, kwargs)
            if on_triton or parts.by_hand_where is None or parts.by_hand_where(*args, **kwargs):
                assert parts.twin is not None
                return cast(R, parts.twin(on_triton, *args, **kwargs))
            return formula(*args, **kwargs)

        made = cast(Operation[P, R], run)
        made.formula = formula
        for part in ("twin", "by_hand_where", "unknown", "check"):
            setattr(made, part, parts.taking(part))
        return made

    return decorate


def without_kernel(name: str, option: str | Callable[..., str | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a formula in the place of the operation `name`, because of an option that its kernel does not know. Where the
    kernel would run but for that, the log says so, once. option: in a word for the log, or what tells it, or that there
    is none, from the arguments."""

    def decorate(formula: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(formula)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            chosen = option(*args, **kwargs) if callable(option) else option
            if chosen is not None:
                asked(name, chosen, args, kwargs)
            return formula(*args, **kwargs)

        return run

    return decorate


def asked(name: str, option: str | None, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the kernel of `name` runs on these arguments."""
    return runs_on_triton(name, *real_tensors((*args, *kwargs.values())), unsupported=option)


def real_tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors of real numbers among the arguments, in their order."""
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            yield argument
        elif isinstance(argument, tuple):
            yield from real_tensors(argument)
