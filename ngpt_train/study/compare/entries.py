"""The entries of report.json (docs/study.md): what is said of each arm and each of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ngpt_train.study.compare.key_kinds import Absent, brought, compared_keys, is_of_training, value_of
from ngpt_train.study.compare.observed import same
from ngpt_train.study.compare.runs import Run
from ngpt_train.study.compare.trials import Arm, Trial
from ngpt_train.study.definition import name_of

MOST_POINTS = 200  # of a training curve
CURVE = {"step": "step", "tokens": "tokens", "flops": "flops", "seconds": "train_seconds"}  # name -> key of a record


def of_arm(arm: Arm, runs: Sequence[Run], overrides: Sequence[str]) -> dict[str, Any]:
    largest = max(arm.best, default=None)
    state = arm.state(largest)
    return {
        "runs": [str(run.path) for run in runs],
        "tuned": state == "bracketed",
        "best": {} if largest is None else dict(arm.best[largest]),
        "overrides": list(overrides),
        "state": state,
        "best_by_budget": {str(budget): dict(values) for budget, values in sorted(arm.best.items())},
    }


def tuning_of_keys(arm: Arm, budget: int | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Of the keys of optimizer, schedule, batch and initialisation at a budget: those of which several values were
    tried there, those that the arm's definition sets or that are not what its recipe brings, and the others that are
    on, each with its values."""
    tried: dict[str, dict[Any, None]] = {}
    for trial in arm.trials:
        for key, value in trial.values if trial.budget == budget else ():
            tried.setdefault(key, {})[value] = None
    tuned = {key: sorted(values, key=repr) if None in values else sorted(values) for key, values in tried.items()}
    found: dict[str, Any] = {"budget": budget, "chosen": {}, "not_tuned": {}}
    found["tuned"] = {key: values for key, values in tuned.items() if len(values) > 1}
    if budget is None:
        return found
    config = next(iter(arm.at_best(budget).values())).run.config
    named = set(map(name_of, overrides))
    for key in [key for key in compared_keys([config]) if is_of_training(key) and key not in found["tuned"]]:
        value, usual = value_of(config, key), brought(config, key)
        by_hand = key in named or not (isinstance(usual, Absent) or same(value, usual))
        if by_hand or not (value is None or isinstance(value, Absent)):
            found["chosen" if by_hand else "not_tuned"][key] = value
    return found


def losses(arm: Arm) -> list[dict[str, Any]]:
    return [
        {
            **_point(trial),
            "loss": trial.loss,
            "rows_hash": trial.run.evals[-1].get("rows_hash"),
            "step": trial.run.steps,
        }
        for trial in arm.trials
        if trial.loss is not None
    ]


def failures(arm: Arm) -> list[dict[str, Any]]:
    return [{**_point(trial), "reason": trial.reason} for trial in arm.trials if trial.loss is None]


def _point(trial: Trial) -> dict[str, Any]:
    run = {"values": dict(trial.values), "run": str(trial.run.path)}
    return {"arm": trial.arm, "budget": trial.budget, "seed": trial.seed, **run}


def tunings(arm: Arm) -> list[dict[str, Any]]:
    """Of each budget and tuned key, with the other keys at their best values."""
    entries = []
    for (budget, key), tuning in sorted(arm.tunings.items()):
        best = dict(arm.best.get(budget, ()))
        points = [
            {"value": dict(trial.values)[key], "loss": trial.loss, "seed": trial.seed, "failed": trial.loss is None}
            for trial in arm.trials
            if trial.budget == budget and all(v == best.get(k, v) for k, v in trial.values if k != key)
        ]
        found = {"state": tuning.state, "points": points, "optimum": tuning.optimum, "low": tuning.low}
        found |= {"high": tuning.high, "price_of_two": tuning.price_of_two, "price_of_grid": tuning.price_of_grid}
        entries.append({"arm": arm.name, "budget": budget, "key": key, **found})
    return entries


def curves(arm: Arm, metric: str) -> list[dict[str, Any]]:
    entries = []
    for trial in arm.trials:
        evals = [record for record in trial.run.evals if record.get(metric) is not None]
        train = [x for x in trial.run.train if None not in (x.get("loss"), x.get("tokens"))]
        train = train[:: max(1, math.ceil(len(train) / MOST_POINTS))]
        columns = {name: [record.get(key) for record in evals] for name, key in {**CURVE, "loss": metric}.items()}
        entries.append(
            {
                **_point(trial),
                "best": trial.loss is not None and trial.values == arm.best.get(trial.budget),
                "eval": columns,
                "train": {"tokens": [x["tokens"] for x in train], "loss": [x["loss"] for x in train]},
            }
        )
    return entries


def finite(value: Any) -> Any:
    """As JSON has it: numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(key): finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
