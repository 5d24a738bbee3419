"""Text that is tokenized while the model trains."""
