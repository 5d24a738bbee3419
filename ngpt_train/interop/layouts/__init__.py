"""Forms in which models are written for other programs, and read back."""
