"""GPT, the baseline."""
