"""Parameters of a test in all their combinations, of which the fast tier takes a few."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairs_first(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` by the product of the axes. The fast tier runs a few combinations, in which each value of an axis
    still meets each value of every other axis; the others are marked exhaustive."""
    combinations = list(itertools.product(*(range(len(values)) for values in axes.values())))
    missing = {pair for combination in combinations for pair in _pairs(combination)}
    fast = set()
    while missing:
        best = max(combinations, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        fast.add(best)
    parameters = []
    for combination in combinations:
        chosen = [values[i] for i, values in zip(combination, axes.values(), strict=True)]
        name = "-".join(_name(axis, x) for axis, x in zip(axes, chosen, strict=True))
        parameters.append(pytest.param(*chosen, id=name, marks=[] if combination in fast else [pytest.mark.exhaustive]))
    return pytest.mark.parametrize(list(axes), parameters)


def _pairs(combination: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))


def _name(axis: str, value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return f"{axis}={value}" if isinstance(value, (bool, int, float)) or value is None else str(value)
