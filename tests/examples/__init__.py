"""Tests of examples that are more than a script."""
