"""Equal runs: studies share them by links, and a run with another configuration is noticed."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import TABLES
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import read_yaml, redact, to_dict, what_differs
from ngpt_train.config.validate import flatten
from ngpt_train.core.errors import DataError
from ngpt_train.study.definition import Study
from ngpt_train.study.points import DONE, WAITING, Point, Result, result_of

# Keys that a resume may change. In a study they make another run, or another validation.
_COUNT_TOO = (
    *("run.init_from", "train.steps", "train.stop_at", "optim.lr", "schedule.warmup_steps"),
    *("eval.every", "eval.rows", "eval.tokens", "eval.budget", "eval.contexts"),
    *("data.path", "data.val_files", "tokenizer.path"),
)

Difference = tuple[str, Any, Any]  # name, stored value, new value


def differences(stored: Config, new: Config) -> list[Difference]:
    """The keys that make runs with these two resolved configs different.

    Left out are name and place, and keys without an effect on the run and its validation: layout, checkpoints, logging.
    """
    old_values, new_values = (dict(flatten(redact(to_dict(config)), TABLES)) for config in (stored, new))
    found = {name: (old, value) for name, old, value in what_differs(stored, new)}
    found |= {name: (old_values[name], new_values[name]) for name in _COUNT_TOO if old_values[name] != new_values[name]}
    return [(name, *values) for name, values in found.items()]


def find_run(study: Study, point: Point, config: Config, steps: int) -> Result | None:
    """A run of another study below study.root, or of another arm, which is equal to the point's; an ended one if
    possible. None without such a run."""
    found = []
    for path in sorted(study.root.glob(f"*/runs/*-seed{point.seed}/config.yaml")):
        run = path.parent
        if run.is_symlink() or run == study.runs / point.directory:
            continue
        stored = _stored(path, path.stat().st_mtime_ns)
        if stored is None or _is_clearly_another(stored, config) or differences(stored, config):
            continue
        result = result_of(point, run, steps, study.metric)
        if result.state != WAITING:
            found.append(result)
    return min(found, key=lambda result: (result.state != DONE, not result.is_final), default=None)


def _is_clearly_another(stored: Config, new: Config) -> bool:
    """True if the runs differ in the usual keys. `differences` gives the same answer, but takes milliseconds for each
    pair of a waiting point and a run of any study."""
    if (stored.train.steps, stored.optim.lr) != (new.train.steps, new.optim.lr):
        return True
    model = replace(new.model, vocab_size=stored.model.vocab_size, init_table=stored.model.init_table)
    return stored.model != model


def link(run: Path, target: Path) -> bool:
    """Makes `run` a link to the directory `target`; False if `run` exists."""
    run.parent.mkdir(parents=True, exist_ok=True)
    try:
        run.symlink_to(os.path.relpath(target.resolve(), run.parent.resolve()))
    except FileExistsError:
        return False
    return True


@lru_cache(maxsize=4096)
def _stored(path: Path, modified: int) -> Config | None:
    try:
        return read_yaml(path)
    except DataError:
        return None
