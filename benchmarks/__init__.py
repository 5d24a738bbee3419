"""Benchmarks, each `python -m benchmarks.NAME` in a clone; docs/benchmarks/ has what they measured."""
