"""Credit from importances.

Modules here know estimators and readers of completions. They turn importances into weights or advantages, and define
how that is configured.
"""
