"""Estimators of importance.

Modules here know `ScoredBatch` and `ModelAccess`. They estimate how much a unit matters; each estimator is one file and
one line of `registry.py`.
"""
