"""The values that a key, or a quantity, has in the runs of each arm and budget, and where they differ."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.validate import show
from ngpt_train.study.compare.key_kinds import UNKNOWN, Absent, brought, value_of
from ngpt_train.study.compare.runs import Run, common_budgets

Arms = Mapping[str, Sequence[Run]]


@dataclass
class Seen:
    """The values of one key, or of one quantity, by arm and budget."""

    key: str
    by_arm: dict[str, dict[int, list[Any]]] = field(default_factory=dict)

    def of(self, arm: str) -> list[Any]:
        return distinct(itertools.chain.from_iterable(self.by_arm[arm].values()))

    @property
    def known(self) -> bool:
        return all(value is not UNKNOWN for arm in self.by_arm for value in self.of(arm))

    @property
    def arms_differ(self) -> bool:
        """Whether two arms do, at a budget that both have; in all, where they share none."""
        return any(
            identities(one[budget]) != identities(other[budget])
            for ones, others in itertools.combinations(self.by_arm, 2)
            for one, other in [_comparable(self.by_arm[ones], self.by_arm[others])]
            for budget in one
        )

    def all(self) -> dict[str, list[Any]]:
        return {arm: self.of(arm) for arm in self.by_arm}

    def shown(self) -> tuple[dict[str, list[Any]], str]:
        """The values of each arm. Where arms that differ have the same ones in all, those of the largest budget at
        which they differ, and the words that say so."""
        if len({frozenset(identities(values)) for values in self.all().values()}) > 1:
            return self.all(), ""
        of_budget: dict[int, dict[str, list[Any]]] = {}
        for arm, found in self.by_arm.items():
            for budget, values in found.items():
                of_budget.setdefault(budget, {})[arm] = distinct(values)
        at = max(b for b, of in of_budget.items() if len({frozenset(identities(x)) for x in of.values()}) > 1)
        return of_budget[at], f"at {at:,} tokens"


def _comparable(one: Mapping[int, list[Any]], other: Mapping[int, list[Any]]) -> tuple[dict[int, list[Any]], ...]:
    """The values of two arms by the budgets that both have; all of them as of one budget, where they share none."""
    if shared := one.keys() & other.keys():
        return {budget: one[budget] for budget in shared}, {budget: other[budget] for budget in shared}
    return tuple({0: list(itertools.chain.from_iterable(found.values()))} for found in (one, other))


def see(key: str, arms: Arms, values: Callable[[Run], list[Any]]) -> Seen:
    """`values` of the runs of each arm and budget."""
    budgets = common_budgets(arms)
    seen = Seen(key)
    for arm, runs in arms.items():
        of_arm = seen.by_arm.setdefault(arm, {})
        for run in runs:
            if found := values(run):
                of_arm.setdefault(budgets[run.path], []).extend(found)
    return seen


def without_shared_budget(arms: Arms) -> list[tuple[str, str]]:
    """Pairs of arms that have no budget in common."""
    budgets = common_budgets(arms)
    of_arm = {arm: {budgets[run.path] for run in runs} for arm, runs in arms.items()}
    return [pair for pair in itertools.combinations(arms, 2) if not of_arm[pair[0]] & of_arm[pair[1]]]


def excess(arms: Arms) -> float:
    """By how much more tokens an arm's runs have been trained at most than another's, at what counts as one budget."""
    of_run = {run.path: run.steps * (run.tokens_per_step or 1) for runs in arms.values() for run in runs}
    budgets = common_budgets(arms)
    tokens = [[n for path, n in of_run.items() if budgets[path] == budget] for budget in set(budgets.values())]
    return max((max(found) / min(found) - 1 for found in tokens), default=0.0)


def first_differences(arms: Arms) -> Iterator[tuple[int, Run, Run, int, list[Any]]]:
    """Pairs of runs of one seed, of one arm or of two: the seed, both runs, the tokens and the hashes where their rows
    first differ."""
    (_, ones), *others = arms.items()
    pairs = itertools.product(ones, others[0][1]) if others else itertools.combinations(ones, 2)
    for one, other in pairs:
        if one.seed != other.seed:
            continue
        a, b = one.data_hashes, other.data_hashes
        for tokens in sorted(a.keys() & b.keys()):
            if a[tokens] != b[tokens]:
                yield one.seed, one, other, tokens, [a[tokens], b[tokens]]
                break


def deviations(key: str, arms: Arms) -> str:
    """Which arms do not have what their architecture and recipe bring, and what that would be."""
    usual = {arm: (value_of(runs[0].config, key), brought(runs[0].config, key)) for arm, runs in arms.items()}
    return "; ".join(
        f"the recipe of {arm} brings {show(expected)}"
        for arm, (value, expected) in usual.items()
        if not isinstance(expected, Absent) and expected != AUTO and not same(value, expected)
    )


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
    """By size, where all are numbers."""
    return sorted(values) if all(type(value) in (int, float) for value in values) else values


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list):
        return [plain(x) for x in value]
    if isinstance(value, Absent) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


def ratio(values: Iterable[Any]) -> float | None:
    numbers = list(values)
    if not numbers or any(type(x) not in (int, float) or not 0 < x < math.inf for x in numbers):
        return None
    return float(max(numbers) / min(numbers))


def all_same(runs: Iterable[Run], fact: Callable[[Run], Any]) -> bool:
    values = {fact(run) for run in runs}
    return len(values) == 1 and None not in values
