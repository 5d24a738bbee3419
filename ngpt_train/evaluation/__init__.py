"""Evaluation of a model: its validation loss, and text that it generates."""

from ngpt_train.evaluation.generation import generate
from ngpt_train.evaluation.validation import Validation, unigram_loss

__all__ = ["Validation", "generate", "unigram_loss"]
