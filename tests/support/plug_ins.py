"""Estimators of `examples/estimators`, as a user names them."""

TOTAL_EFFECTS = {"estimator": "examples.estimators.total_effects:TotalEffects"}
RESAMPLING = {"estimator": "examples.estimators.resampling:Resampling"}
