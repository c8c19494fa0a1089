"""Change a training step in ways that are being tried out, behind one hook, see `hook.py`."""
