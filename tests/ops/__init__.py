"""Tests of the rooms of the same name; run with `python -m pytest` from the repository."""
