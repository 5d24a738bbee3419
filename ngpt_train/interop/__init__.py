"""Models in the formats of others: transformers' and NVIDIA's."""
