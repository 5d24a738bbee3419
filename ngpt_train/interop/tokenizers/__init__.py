"""Tokenizers in the files of transformers, and back."""
