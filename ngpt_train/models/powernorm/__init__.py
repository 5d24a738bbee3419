"""PowerNorm."""
