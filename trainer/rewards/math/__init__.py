"""Reward answers that are mathematically equal to the data's, by math-verify in a process of its own."""
