"""Tasks of lm-evaluation-harness on a model as it is, without an export."""

from ngpt_train.evaluation.tasks.run_tasks import TaskResults, Tasks

__all__ = ["TaskResults", "Tasks"]
