"""What a run looks like afterwards, or beforehand."""
