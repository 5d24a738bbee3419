"""The values of a key, a fact or a quantity in the runs of each arm and budget, and where they differ."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ngpt_train.study.compare.key_kinds import UNKNOWN, Absent
from ngpt_train.study.compare.runs import Run, common_budgets

Arms = Mapping[str, Sequence[Run]]


class Seen:
    """The values of one key, fact or quantity.

    by_arm[arm][budget]: list of values, as many as the runs gave.
    """

    def __init__(self, key: str, arms: Arms, values: Callable[[Run], list[Any]]) -> None:
        self.key = key
        self.by_arm: dict[str, dict[int, list[Any]]] = {}
        budgets = common_budgets(arms)
        for arm, runs in arms.items():
            of_arm = self.by_arm.setdefault(arm, {})
            for run in runs:
                if found := values(run):
                    of_arm.setdefault(budgets[run.path], []).extend(found)

    def of(self, arm: str) -> list[Any]:
        return distinct(itertools.chain.from_iterable(self.by_arm[arm].values()))

    def all(self) -> dict[str, list[Any]]:
        return {arm: self.of(arm) for arm in self.by_arm}

    @property
    def known(self) -> bool:
        return all(value is not UNKNOWN for values in self.all().values() for value in values)

    @property
    def arms_differ(self) -> bool:
        """True if two arms differ at a shared budget; or altogether, if they share none."""
        return any(
            identities(one[budget]) != identities(other[budget])
            for ones, others in itertools.combinations(self.by_arm.values(), 2)
            for one, other in [_comparable(ones, others)]
            for budget in one
        )

    def shown(self) -> tuple[dict[str, list[Any]], str]:
        """The values of each arm, and a remark. If arms differ at a budget but have the same values in all, the values
        of the largest such budget."""
        if _differ(self.all()):
            return self.all(), ""
        budgets = sorted({budget for of_arm in self.by_arm.values() for budget in of_arm}, reverse=True)
        for budget in budgets:
            found = {arm: distinct(of_arm[budget]) for arm, of_arm in self.by_arm.items() if budget in of_arm}
            if _differ(found):
                break
        return found, f"at {budget:,} tokens"


def _differ(values: Mapping[str, list[Any]]) -> bool:
    return len({frozenset(identities(found)) for found in values.values()}) > 1


def _comparable(one: Mapping[int, list[Any]], other: Mapping[int, list[Any]]) -> tuple[dict[int, list[Any]], ...]:
    """The values of two arms at their shared budgets; all values under budget 0, if they share none."""
    if shared := one.keys() & other.keys():
        return {budget: one[budget] for budget in shared}, {budget: other[budget] for budget in shared}
    return tuple({0: list(itertools.chain.from_iterable(found.values()))} for found in (one, other))


def identity(value: Any) -> Any:
    if isinstance(value, Absent):
        return id(value)
    return json.dumps(float(value) if type(value) is int else value, sort_keys=True, default=str)


def same(one: Any, other: Any) -> bool:
    return identity(one) == identity(other)


def identities(values: Iterable[Any]) -> set[Any]:
    return {identity(value) for value in values}


def distinct(values: Iterable[Any]) -> list[Any]:
    return list({identity(value): value for value in values}.values())


def ordered(values: list[Any]) -> list[Any]:
    """By size, if all are numbers."""
    return sorted(values) if all(type(value) in (int, float) for value in values) else values


def plain(value: Any) -> Any:
    """The value in JSON."""
    if isinstance(value, list):
        return [plain(x) for x in value]
    if isinstance(value, Absent) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def ratio(values: Iterable[Any]) -> float | None:
    """The largest value over the smallest; None unless all are positive numbers."""
    numbers = list(values)
    if not numbers or any(type(x) not in (int, float) or not 0 < x < math.inf for x in numbers):
        return None
    return float(max(numbers) / min(numbers))
