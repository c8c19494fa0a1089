"""Train a language model by reinforcement with counterfactual credit: `cfa-train`.

Read `step.py`, one step, then `microbatch.py`, the inputs of the model and of credit, then `run.py`, the way from the
settings to the saved model. Next to them are `rollouts/`, `rewards/`, `checkpoints/` and `report/`. `config.py` checks
settings, `data.py` rows, `policy.py` the model and `checks.py` numbers.

A run by default reads nothing of `rewards/code.py`, `rewards/math.py`, `rollouts/vllm.py` and
`experimental/`. `embedded/` holds the problems and the model of the demo, `analyze/` looks at what runs have written.
"""
