"""Parts that the architectures share."""
