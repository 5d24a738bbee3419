"""Observing a run: its speed and its records, and the sinks for them."""
