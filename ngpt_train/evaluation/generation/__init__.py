"""Text from a model: sampling, the tokens of several prompts beside each other, and their text as it comes."""
