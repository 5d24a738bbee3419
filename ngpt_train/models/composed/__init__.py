"""A decoder composed of norms and their places."""
