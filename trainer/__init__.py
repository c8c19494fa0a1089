"""Train a language model by reinforcement with counterfactual credit: `cfa-train`.

Read `run.py`, the way from the settings to the saved model, and `step.py`, one step. Next to them are `rollouts/`,
`rewards/`, `checkpoints.py` and `report/`. `config.py` checks settings, `data.py` rows, `policy.py` the model and
`metrics.py` numbers. `embedded/` holds the demo's problems and model, `analyze/` looks at what runs have written.
"""
