"""study.yaml, the definition of a study in its directory, and the changes allowed to a study that has begun."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ngpt_train.config.validate import show
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import read_yaml_text, write_atomically
from ngpt_train.core.secrets import redacted
from ngpt_train.study.composition import Runs
from ngpt_train.study.definition import LR, Study, Tuned
from ngpt_train.study.points import Point
from ngpt_train.study.sharing import differences

FILE = "study.yaml"
_LEFT_BY_A_KILLED_START = ("lock", f".{FILE}.partial")


def write_study(study: Study) -> None:
    """Writes study.yaml."""
    study.path.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(redacted(_tree(study)), sort_keys=False, allow_unicode=True)
    write_atomically(study.path / FILE, text.encode())


def read_stored(directory: Path) -> Study:
    """The study of a directory. Raises DataError if its study.yaml is missing or damaged."""
    path = directory / FILE
    try:
        tree = yaml.safe_load(read_yaml_text(path))
        return Study(
            name=directory.name,
            root=directory.parent,
            baseline=str(tree["baseline"]),
            arms={str(arm): tuple(map(str, row)) for arm, row in tree["arms"].items()},
            shared=tuple(map(str, tree["shared"])),
            budgets=tuple(map(int, tree["budgets"])),
            tune={str(k): Tuned(x) if k == LR else Tuned(values=tuple(x)) for k, x in tree["tune"].items()},
            seeds=tuple(map(int, tree["seeds"])),
            metric=str(tree["metric"]),
            confidence=float(tree["confidence"]),
            max_points=int(tree["max_points"]),
            options=tuple(map(str, tree["options"])),
            command=str(tree["command"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise DataError(f"{path} is missing or damaged: {' '.join(str(error).split())}. Restore it.") from None


def check_stored(study: Study, runs: Runs) -> None:
    """Raises ConfigError, with the differences, if the study's directory holds another study. This study may have more
    arms, budgets, seeds and points than the stored one."""
    if not study.path.exists():
        return
    if not (study.path / FILE).exists():
        if any(entry.name not in _LEFT_BY_A_KILLED_START for entry in study.path.iterdir()):
            raise ConfigError(
                f"study.name={study.name}: {study.path} exists and is not the directory of a study. Choose another "
                "study.name or study.root."
            )
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
        fix = "A study that has begun takes more arms, budgets and seeds, and a larger study.max_points. For anything "
        fix += "else choose another study.name: it shares the runs that stay the same."
        problem = f"study.name={study.name}: {study.path} holds another study; stored -> asked for:"
        raise ConfigError("\n  ".join([problem, *(f"  {line}" for line in lines), fix]))


def _changed(stored: Study, study: Study) -> list[str]:
    lines = []
    for name in ("baseline", "metric", "confidence"):
        old, new = getattr(stored, name), getattr(study, name)
        if old != new:
            lines.append(f"study.{name}: {show(old)} -> {show(new)}")
    if stored.tune != study.tune:
        lines.append(f"study.tune: {show(_tree(stored)['tune'])} -> {show(_tree(study)['tune'])}")
    if study.max_points < stored.max_points:
        lines.append(f"study.max_points: {stored.max_points} -> {study.max_points}")
    if missing := [budget for budget in stored.budgets if budget not in study.budgets]:
        lines.append(f"study.budgets: {show(list(stored.budgets))} -> {show(list(study.budgets))}, without {missing}")
    if study.seeds[: len(stored.seeds)] != stored.seeds:  # the first one is tuned with
        lines.append(f"study.seeds: {show(list(stored.seeds))} -> {show(list(study.seeds))}; new ones come last")
    if missing_arms := [arm for arm in stored.arms if arm not in study.arms]:
        lines.append(f"study.arms: without {', '.join(missing_arms)}")
    return lines


def _changed_arms(stored: Study, study: Study, runs: Runs) -> list[str]:
    """Compares the configurations of runs: arguments that change no run, such as a layout, may differ."""
    before = Runs(replace(stored, options=study.options))
    lines = []
    for arm in (arm for arm in stored.arms if arm in study.arms):
        for budget in (budget for budget in stored.budgets if budget in study.budgets):
            point = Point(arm, budget, (), study.seeds[0])
            try:
                found = differences(before.config(point), runs.config(point))
            except ConfigError as error:
                found = [("its configuration", "(cannot be composed any more)", str(error).splitlines()[0])]
            lines += [f"arm {arm}: {name}: {show(old)} -> {show(new)}" for name, old, new in found]
    return list(dict.fromkeys(lines))


def _tree(study: Study) -> dict[str, Any]:
    return {
        "baseline": study.baseline,
        "arms": {arm: list(row) for arm, row in study.arms.items()},
        "shared": list(study.shared),
        "budgets": list(study.budgets),
        "tune": {key: list(tuned.values) if tuned.values else tuned.factor for key, tuned in study.tune.items()},
        "seeds": list(study.seeds),
        "metric": study.metric,
        "confidence": study.confidence,
        "max_points": study.max_points,
        "options": list(study.options),
        "command": study.command,
    }
