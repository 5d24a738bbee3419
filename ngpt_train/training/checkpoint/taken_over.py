"""The model of another run that fine-tuning goes on with: its keys of model.*, as arguments."""

from collections.abc import Sequence
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config, schema_keys
from ngpt_train.config.stored import read_yaml, to_dict
from ngpt_train.config.validate import flatten, show
from ngpt_train.training.checkpoint.catalogue import find_checkpoint


def with_trained_model(arguments: Sequence[str]) -> list[str]:
    """The model of run.init_from, which is among the arguments, and then `arguments`, which win. Raises DataError
    without a checkpoint there."""
    given = {name.strip(): value.strip() for name, _, value in (x.partition("=") for x in arguments)}
    stored = read_yaml(find_checkpoint("run.init_from", given["run.init_from"].strip("'\"")) / "config.yaml")
    of_run = {"model": stored.model.name, **_model_arguments(stored)}
    return [*(f"{name}={value}" for name, value in of_run.items() if name not in given), *arguments]


def _model_arguments(stored: Config) -> dict[str, str]:
    """model.* of a run as arguments, by key, without tables and without what another head or schedule changes."""
    keys = schema_keys(type(stored.model))
    anew = {"model.name", "model.n_classes", "model.psi_warmup_steps"}
    return {
        name: _written(value)
        for name, value in flatten({"model": to_dict(stored)["model"]}, keys)
        if name not in anew and not keys[name].is_table and value != AUTO
    }


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else show(value)
