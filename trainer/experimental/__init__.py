"""Change a training step experimentally, behind one hook, see `hook.py`."""
