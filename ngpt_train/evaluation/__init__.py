"""Evaluation of a model: its validation loss, and text that it generates."""

from ngpt_train.evaluation.evaluations import Evaluations, RowFiles
from ngpt_train.evaluation.generation import generate
from ngpt_train.evaluation.validation import Validation, unigram_loss

__all__ = ["Evaluations", "RowFiles", "Validation", "generate", "unigram_loss"]
