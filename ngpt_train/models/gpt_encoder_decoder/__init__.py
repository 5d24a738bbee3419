"""The N-Transformer's baseline."""
