"""Train a language model by reinforcement with counterfactual credit: `python -m trainer`.

To be read in this order: `step.py` is a step, `microbatch.py` what it feeds to the model and how credit is asked for,
`run.py` all from the settings to the saved model. Beside them are `rollouts/`, `rewards/`, `checkpoints/`, `report/`
and what is checked: of settings in `config.py`, of rows in `data.py`, of a model in `policy.py`, of numbers in
`checks.py`.

A run by default reads nothing of `rewards/code.py`, `rewards/math.py`, `rollouts/vllm.py` and
`experimental/`. `embedded/` holds the problems and the model of the demo, `analyze/` looks at what runs have written.
"""
