"""Benchmarks: what is compared runs side by side, in turn, in one process. `python -m ngpt_train bench WHAT`."""
