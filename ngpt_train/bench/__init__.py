"""Benchmarks, `python -m ngpt_train bench WHAT`. Things that are compared take turns in one process."""
