"""Change a training step experimentally."""
