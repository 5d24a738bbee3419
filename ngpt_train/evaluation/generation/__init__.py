"""Text from a model: sampling, the tokens of several prompts beside each other, and their text as it comes."""

from ngpt_train.evaluation.generation.sampling import sample
from ngpt_train.evaluation.generation.tokens import generate

__all__ = ["generate", "sample"]
