"""How the best learning rate of an architecture changes with its width, its depth and the length of a run."""
