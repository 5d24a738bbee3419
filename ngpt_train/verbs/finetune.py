"""`finetune`: trains the model of another run on a task with labels, docs/objectives.md."""

import importlib
from collections.abc import Sequence

from ngpt_train.config.arguments import name_of
from ngpt_train.config.schema import Config
from ngpt_train.config.validate import mistake
from ngpt_train.training.checkpoint.taken_over import with_trained_model


def arguments(overrides: Sequence[str]) -> list[str]:
    """The arguments of `train`. Raises ConfigError without run.init_from, DataError without a checkpoint there."""
    if "run.init_from" not in map(name_of, overrides):
        problem = "finetune: run.init_from names no trained model"
        raise mistake(problem, "For example: ngpt-train finetune run.init_from=runs/NAME task=rte")
    return with_trained_model(overrides)


def main(config: Config, overrides: Sequence[str]) -> int:
    """As `train`. Raises ConfigError without a task."""
    if config.data.label_field is None:
        fix = "Choose task=NAME, or set data.label_field, data.text_field and data.labels"
        raise mistake("finetune: data.label_field=null: there are no labels to answer", fix)
    train = importlib.import_module("ngpt_train.verbs.train")
    return int(train.main(config, overrides))
