"""An encoder-decoder composed of norms and their places."""
