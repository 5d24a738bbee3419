"""The N-Transformer, nGPT's encoder-decoder."""
