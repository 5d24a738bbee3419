"""Generates text: sampling, the tokens of a batch of prompts, and their text."""
