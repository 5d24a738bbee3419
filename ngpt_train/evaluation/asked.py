"""The tasks that a config names. lm-evaluation-harness is imported where there are some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.sections.verbs import EvalConfig
from ngpt_train.distributed import World

if TYPE_CHECKING:
    from ngpt_train.evaluation.tasks import Tasks


def tasks_of(validation: EvalConfig, model: ModelConfig, world: World) -> Tasks | None:
    """The tasks of eval.tasks with their data, for a model of these keys; None where there are none. A collective call.

    Raises ConfigError for what is no task or none of this model, DataError where the data of one cannot be had.
    """
    if validation.tasks is None:
        return None
    from ngpt_train.evaluation.tasks import Tasks

    return Tasks(validation, model.source_length(model.context), world)
