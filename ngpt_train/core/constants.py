"""Values and words that one room writes and another reads: of a batch, and of a model's rows."""

from typing import Literal

IGNORED = -100  # target that the loss leaves out, as in torch's cross_entropy
PADDING = -1  # document id of a position that belongs to no document
Constraint = Literal["free", "sphere", "ball"]  # where a step leaves the rows of matrices: of length 1, or at most 1
