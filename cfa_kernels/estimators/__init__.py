"""Estimators of importance.

A module here knows `ScoredBatch` and `ModelAccess`; what belongs here says how much a unit matters, one file and one
line of `registry.py` for each estimator.
"""
