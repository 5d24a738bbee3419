"""`transfer`: the change of the best learning rate with width, depth and the length of a run."""
