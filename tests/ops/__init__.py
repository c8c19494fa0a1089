"""Tests of the packages of the same name; run with `python -m pytest` from the repository."""
