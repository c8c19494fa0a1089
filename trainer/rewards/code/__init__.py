"""Reward programs that pass their tests, run where they can do no harm; tasks of MBPP."""
