"""What a model is worth: validation loss, and text that it writes."""

from ngpt_train.evaluation.generation import generate
from ngpt_train.evaluation.validation import Validation, unigram_loss

__all__ = ["Validation", "generate", "unigram_loss"]
