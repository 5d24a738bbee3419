"""Special values in a batch, which one room writes and another reads."""

IGNORED = -100  # target that the loss leaves out, as in torch's cross_entropy
PADDING = -1  # document id of a position that belongs to no document
