"""Benchmarks: every contender is checked before it is timed. `python -m benchmarks` runs and records all of them."""
