"""The baseline of the N-Transformer."""
