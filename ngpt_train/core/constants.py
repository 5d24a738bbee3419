"""Values with a meaning in a batch, for those who fill it (data) and those who read it (models, training)."""

IGNORED = -100  # target that does not count, as in torch's cross_entropy
PADDING = -1  # document id of positions that are none
