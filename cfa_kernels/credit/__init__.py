"""Credit from importances.

A module here knows estimators and what reads completions; what belongs here turns importances into weights or
advantages, or says how that is configured.
"""
