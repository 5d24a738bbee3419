"""nGPT, the normalized Transformer."""
