"""Evaluation of a model: its validation loss, tasks, and text that it generates."""

from ngpt_train.evaluation.evaluations import Evaluations, RowFiles
from ngpt_train.evaluation.validation import Validation, unigram_loss

__all__ = ["Evaluations", "RowFiles", "Validation", "unigram_loss"]
