"""Pretraining of normalized Transformers, and a fair comparison with the ones that are not."""

__version__ = "0.1.0"
