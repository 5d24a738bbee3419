"""Arms: runs whose configs differ only in seed, budget and tuned keys, or runs named by the user."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from ngpt_train.config.keys import AUTO
from ngpt_train.config.validate import mistake, show
from ngpt_train.study.compare.compared_keys import HARDWARE, HARMLESS, OF_THE_BUDGET, covers, identity
from ngpt_train.study.compare.runs import Arms, Run
from ngpt_train.study.definition import LR, check_arm
from ngpt_train.study.tuning import Values

# Keys that may differ between runs of an arm. They separate arms only if nothing else tells two runs apart.
_SECONDARY = {*OF_THE_BUDGET, *HARDWARE, "eval", "guards", "train.batch_tokens", "run"} - {LR}
_OF_A_STUDY = re.compile(r"(?P<arm>.+)-\d+(-.+)?-seed\d+(-[0-9a-f]{12})?")  # the names of a study's runs
_SIZES = re.compile(r"-d\d+-L\d+$")  # of an arm's name, by `transfer`
_NUMBER = re.compile(r"[-_.]?(seed|s|lr)?[-_.]?\d[\d.]*(e[-+]?\d+)?", re.IGNORECASE)

T = TypeVar("T")


def named_arms(runs: Sequence[Run], patterns: Sequence[str]) -> tuple[Arms, list[Run]]:
    """The arms of compare.arms, NAME:PATTERN each, and the runs in none of them. Raises ConfigError."""
    arms: dict[str, list[Run]] = {}
    taken: dict[Path, str] = {}
    for item in patterns:
        name, colon, pattern = item.partition(":")
        if not colon or not name or not pattern:
            fix = "For example compare.arms=[gpt:gpt-*,ngpt:ngpt-*]"
            raise mistake(f"compare.arms: {item} is not NAME:PATTERN", fix)
        found = [run for run in runs if any(fnmatchcase(known, pattern) for known in _known_as(run))]
        if not found:
            names = ", ".join(sorted(run.path.name for run in runs)[:8])
            raise mistake(f"compare.arms: no run is named {pattern}", f"Among the runs are: {names}")
        for run in found:
            if taken.setdefault(run.path, name) != name:
                raise mistake(f"compare.arms: {run.path} is in {taken[run.path]} and in {name}", "Narrow one pattern")
        arms.setdefault(name, []).extend(run for run in found if run not in arms.get(name, []))
    return arms, [run for run in runs if run.path not in taken]


def _known_as(run: Run) -> tuple[str, str, str]:
    return run.path.name, str(run.path), str(run.config.get("run.name", ""))


def found_arms(runs: Sequence[Run], tuned: Collection[str]) -> Arms:
    """Arms by the configs, in the order of their first runs."""
    groups, n_before = [list(runs)], 0
    while len(groups) > n_before:
        n_before = len(groups)
        groups = [part for group in groups for part in _split(group, _primary(group, tuned))]
    groups = [part for group in groups for part in _apart(group, tuned)]
    groups.sort(key=lambda group: min(runs.index(run) for run in group))
    return dict(zip(_names(groups, tuned), groups, strict=True))


def _primary(group: Sequence[Run], tuned: Collection[str]) -> list[str]:
    """The keys that separate arms. Only keys of all configs count: older configs and other architectures lack some."""
    common = set.intersection(*(set(run.config) for run in group))
    return sorted(key for key in common if not covers({*HARMLESS, *tuned, *_SECONDARY}, key))


def _split(group: Sequence[Run], keys: Sequence[str]) -> list[list[Run]]:
    """The runs grouped by the values of keys."""
    return grouped(group, lambda run: tuple(identity(run.config.get(key)) for key in keys))


def _apart(group: list[Run], tuned: Collection[str]) -> list[list[Run]]:
    """Splits runs of equal budget, seed and tuned values: by secondary keys, by directory (two studies), or by name."""
    point = lambda run: json.dumps([run.budget, values_of(run, tuned), run.seed], default=str)  # noqa: E731
    if max(Counter(map(point, group)).values()) < 2:
        return [group]
    keys = {key for run in group for key in run.config if covers(_SECONDARY, key) and not covers(HARMLESS, key)}
    follows = {"train.steps", "run.seed", *tuned}
    differing = []
    for twins in grouped(group, point):
        differing += [key for key in keys - follows if len(_split(twins, [key])) > 1]
    by_keys = _split(group, sorted(set(differing)))
    for parts in (by_keys, grouped(group, lambda run: run.path.parent.resolve()), grouped(group, stem)):
        if len(parts) > 1:
            return parts
    return [[run] for run in group]


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """The items by their key, in the order of their first ones."""
    parts: dict[Any, list[T]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return list(parts.values())


def stem(run: Run) -> str:
    """The name of a run without numbers and seed: `gpt-819200-lr0.02-seed0` -> gpt, `a-1` -> a."""
    if found := _OF_A_STUDY.fullmatch(run.path.name):
        return found["arm"]
    return _NUMBER.sub("", run.path.name) or run.path.name


def _names(groups: Sequence[Sequence[Run]], tuned: Collection[str]) -> list[str]:
    """A distinct name for each group: the common name of its runs, their architecture, or the differing keys."""
    of_studies = [[stem(run) for run in group if _OF_A_STUDY.fullmatch(run.path.name)] for group in groups]
    candidates: list[list[str | None]] = [
        [_only(names) for names in of_studies],
        [_only(_SIZES.sub("", name) for name in names) for names in of_studies],
        [_only(str(run.config.get("model.name", "")) for run in group) for group in groups],
        [_only(stem(run) for run in group) for group in groups],
        [_differences(group, groups, tuned) for group in groups],
        _places(groups),
        [group[0].path.name for group in groups],
    ]
    for names in candidates:
        if all(names) and len(set(names)) == len(names):
            return [str(name) for name in names]
    return [str(group[0].path) for group in groups]


def _places(groups: Sequence[Sequence[Run]]) -> list[str | None]:
    """`first/gpt`, `second/gpt`, for runs with equal names in several directories."""
    parents = [_only(str(run.path.parent.resolve()) for run in group) for group in groups]
    stems = [_only(stem(run) for run in group) for group in groups]
    if None in parents:
        return [None]
    common = os.path.commonpath([str(parent) for parent in parents])
    parts = [[x for x in Path(str(parent)).relative_to(common).parts if x != "runs"] for parent in parents]
    return ["/".join([*place, *([of_runs] if of_runs else [])]) for place, of_runs in zip(parts, stems, strict=True)]


def _only(names: Iterable[str]) -> str | None:
    found = set(names)
    return found.pop() if len(found) == 1 else None


def _differences(group: Sequence[Run], groups: Sequence[Sequence[Run]], tuned: Collection[str]) -> str:
    firsts = [other[0] for other in groups]
    keys = sorted({key for run in firsts for key in _primary([run], tuned)})
    differing = [key for key in keys if len(_split([run for run in firsts if key in run.config], [key])) > 1]
    own = [key for key in differing if key in group[0].config]
    return ",".join(f"{key.rpartition('.')[2]}={show(group[0].config[key])}" for key in own[:3])


def choose_baseline(arms: Arms, wanted: str | None) -> str:
    """The arm `wanted`, or the arm of a run with this name; by default gpt, else the first. Raises ConfigError."""
    if wanted is None:
        plain = [name for name, runs in arms.items() if name == "gpt" or runs[0].config.get("model.name") == "gpt"]
        return "gpt" if "gpt" in arms else (plain or list(arms))[0]
    for name, runs in arms.items() if wanted not in arms else ():
        if any(wanted.rstrip("/") in (run.path.name, str(run.path)) for run in runs):
            return name
    check_arm(f"compare.baseline={wanted}", wanted, arms)
    return wanted


def values_of(run: Run, tuned: Collection[str]) -> Values:
    """(tuned key, value), sorted by key, hashable."""
    values = {key: run.config.get(key) for key in sorted(tuned)}
    if values.get(LR) == AUTO:
        values[LR] = None
    return tuple((key, hashable(value)) for key, value in values.items())


def hashable(value: Any) -> Any:
    """A value as in `values_of`: a list is its JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value
