"""`finetune`: trains the model of another run on a task with labels, docs/objectives.md."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config, schema_keys
from ngpt_train.config.stored import read_yaml, to_dict
from ngpt_train.config.validate import flatten, mistake, show
from ngpt_train.training.checkpoint.catalogue import find_checkpoint


def arguments(overrides: Sequence[str]) -> list[str]:
    """The arguments of `train`: the keys of model.* of run.init_from's run, and then `overrides`, which win.

    Raises ConfigError without run.init_from, DataError without a checkpoint there.
    """
    given = {name.strip(): value.strip() for name, _, value in (x.partition("=") for x in overrides)}
    if "run.init_from" not in given:
        problem = "finetune: run.init_from names no trained model"
        raise mistake(problem, "For example: ngpt-train finetune run.init_from=runs/NAME task=rte")
    stored = read_yaml(find_checkpoint("run.init_from", given["run.init_from"].strip("'\"")) / "config.yaml")
    of_run = {"model": stored.model.name, **model_arguments(stored)}
    return [*(f"{name}={value}" for name, value in of_run.items() if name not in given), *overrides]


def model_arguments(stored: Config) -> dict[str, str]:
    """model.* of a run as arguments, by key, without tables and without what another head changes."""
    keys = schema_keys(type(stored.model))
    return {
        name: _written(value)
        for name, value in flatten({"model": to_dict(stored)["model"]}, keys)
        if name not in ("model.name", "model.n_classes") and not keys[name].is_table and value != AUTO
    }


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else show(value)


def main(config: Config, overrides: Sequence[str]) -> int:
    """As `train`. Raises ConfigError without a task."""
    if config.data.label_field is None:
        fix = "Choose task=NAME, or set data.label_field, data.text_field and data.labels"
        raise mistake("finetune: data.label_field=null: there are no labels to answer", fix)
    train = importlib.import_module("ngpt_train.verbs.train")
    return int(train.main(config, overrides))
