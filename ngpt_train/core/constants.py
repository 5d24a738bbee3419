"""Special values in a batch: data/ writes them, models/ and training/ read them."""

IGNORED = -100  # target that the loss leaves out, as in torch's cross_entropy
PADDING = -1  # document id of a position that belongs to no document
