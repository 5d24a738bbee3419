"""An operation is a function whose body is its formula; the decorator swaps in what computes the same faster.

    @operation("sphere_step", twin=by_hand_or_on_triton)
    def sphere_step(h, x, alpha):
        return Norm(h + alpha * (Norm(x) - h))

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


class Operation(Protocol[P, R_co]):
    """What `operation` makes of a formula."""

    formula: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def operation(
    name: str | None,
    twin: Callable[..., Any],
    by_hand: Callable[..., bool] | None = None,
    unknown: Callable[..., str | None] | None = None,
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Each function given takes the formula's arguments; `twin` takes before them whether it is to run on Triton.

    name: the operation's in `kernels.dispatch` and in the log; None where the twin has no kernel of Triton's, or asks
        for it itself.
    twin: computes the same, on Triton or with gradients by hand.
    by_hand: whether the twin is the better one without Triton, too; without this function it is.
    unknown: what of the arguments the kernel does not know, in a word for the log.
    check: raises ValueError for arguments that do not fit.
    """

    def decorate(formula: Callable[P, R]) -> Operation[P, R]:
        @functools.wraps(formula)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if check is not None:
                check(*args, **kwargs)
            option = None if unknown is None else unknown(*args, **kwargs)
            on_triton = name is not None and asked(name, option, args, kwargs)
            if on_triton or by_hand is None or by_hand(*args, **kwargs):
                return cast(R, twin(on_triton, *args, **kwargs))
            return formula(*args, **kwargs)

        made = cast(Operation[P, R], run)
        made.formula = formula
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
