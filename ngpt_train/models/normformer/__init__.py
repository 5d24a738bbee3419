"""NormFormer."""
