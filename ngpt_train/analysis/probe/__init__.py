"""Where a model's validation loss is: sums over classes of tokens, which add up to it exactly, and rows to read."""
