"""Whether the study that has begun in a directory is this one, or has grown into it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ngpt_train.config.validate import show
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.study.definition import FILE, LR, Study, read_stored, tree_of
from ngpt_train.study.points import Point, Runs, differences

_LEFT_BY_A_KILLED_START = ("lock", f".{FILE}.partial")


def check_stored(study: Study, runs: Runs) -> None:
    """Raises ConfigError, with the differences, if the study's directory holds another study. This study may have more
    arms, budgets, seeds and points than the stored one."""
    if not study.path.exists():
        return
    if not (study.path / FILE).exists():
        if any(entry.name not in _LEFT_BY_A_KILLED_START for entry in study.path.iterdir()):
            problem = f"study.name={study.name}: {study.path} exists and is not the directory of a study"
            raise ConfigError(f"{problem}. Choose another study.name or study.root.")
        return
    try:
        stored = read_stored(study.path)
    except DataError as error:
        fix = "or choose another study.name: it shares the runs that stay the same."
        raise DataError(f"{str(error).removesuffix('.')}, {fix}") from None
    if not any(study.runs.glob("*/config.yaml")):
        return  # the first runs could not begin, with a wrong data.path for example
    lines = [*_changed(stored, study), *_changed_arms(stored, study, runs)]
    if lines:
        fix = "A study that has begun takes more arms, which may be tuned for keys of their own, budgets, seeds and "
        fix += "values in lists of study.tune, larger study.max_points and study.descent_runs, and study.refine=true. "
        fix += "For anything else choose another study.name: it shares the runs that stay the same."
        raise mismatch(f"study.name={study.name}: {study.path} holds another study", lines, fix)


def _changed(stored: Study, study: Study) -> Iterator[str]:
    """The differences between the stored definition and this one that are not allowed."""
    old, new = tree_of(stored), tree_of(study)
    names = [name for name in ("baseline", "metric", "confidence", "descent_budget") if old[name] != new[name]]
    has_grown = all(_has_grown(stored.keys_of(arm), study.keys_of(arm)) for arm in stored.arms if arm in study.arms)
    names += [] if has_grown and old["tune"][LR] == new["tune"][LR] else ["tune"]
    names += ["max_points"] if study.max_points < stored.max_points else []
    names += ["refine"] if study.refine < stored.refine else []
    names += ["descent_runs"] if (study.descent_runs or math.inf) < (stored.descent_runs or math.inf) else []
    yield from (f"study.{name}: {show(old[name])} -> {show(new[name])}" for name in names)
    if missing := [budget for budget in stored.budgets if budget not in study.budgets]:
        yield f"study.budgets: {show(old['budgets'])} -> {show(new['budgets'])}, without {missing}"
    if study.seeds[: len(stored.seeds)] != stored.seeds:  # the first one is tuned with
        yield f"study.seeds: {show(old['seeds'])} -> {show(new['seeds'])}; new ones come last"
    if missing_arms := [arm for arm in stored.arms if arm not in study.arms]:
        yield f"study.arms: without {', '.join(missing_arms)}"


def _has_grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether an arm is tuned for the same keys. Tuples of values may have grown, behind the same first value."""

    def alike(a: Any, b: Any) -> bool:
        are_tuples = isinstance(a, tuple) and isinstance(b, tuple)
        return a[0] == b[0] and set(a) <= set(b) if are_tuples else bool(a == b)

    return old.keys() == new.keys() and all(alike(old[key], new[key]) for key in old)


def _changed_arms(stored: Study, study: Study, runs: Runs) -> list[str]:
    """Compares the configurations of runs: arguments that change no run, such as a layout, may differ."""
    before = Runs(replace(stored, options=study.options))
    lines = []
    for arm, budget in product(stored.arms, stored.budgets):
        if arm not in study.arms or budget not in study.budgets:
            continue
        point = Point(arm, budget, (), study.seeds[0])
        try:
            found = differences(before.config(point), runs.config(point))
        except ConfigError as error:
            found = [("its configuration", "(cannot be composed any more)", str(error).splitlines()[0])]
        lines += [f"arm {arm}: {name}: {show(old)} -> {show(new)}" for name, old, new in found]
    return list(dict.fromkeys(lines))


def mismatch(problem: str, lines: Sequence[str], fix: str) -> ConfigError:
    """lines: `name: stored -> asked for` of each difference."""
    return ConfigError("\n  ".join([f"{problem}; stored -> asked for:", *(f"  {line}" for line in lines), fix]))
