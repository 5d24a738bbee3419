"""Verbs that look into checkpoints."""
