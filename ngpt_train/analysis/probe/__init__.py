"""A model's validation loss by classes of tokens, as sums that add up to it exactly, and rows to read."""
