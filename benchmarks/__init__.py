"""Check every contender, then time it. `python -m benchmarks` runs and records all benchmarks."""
