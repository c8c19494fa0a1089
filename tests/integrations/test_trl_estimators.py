"""Every estimator of credit in TRL's trainer: what it is given, and what becomes of the advantages."""

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.estimators.base import Importances
from tests.support.trl_training import build, changed, logged, record_generations

pytestmark = pytest.mark.slow

NAMED = ["masking", "gradient", "entropy", "prefix_tree", "sibling_edits"]


@pytest.mark.parametrize("options", [*({"estimator": name} for name in NAMED), {"effect": "total"}], ids=str)
def test_an_estimator_by_name_trains(train, theirs, options):
    mine = train(trainer={"counterfactual": CounterfactualConfig(**options)})
    assert changed(mine, theirs)
    assert torch.isfinite(torch.tensor(logged(mine, "loss"))).all()
    assert logged(mine, "credit/scored_fraction")[0] > 0


def test_an_estimator_sees_the_rewards_and_groups_of_this_step(train):
    seen = []

    def estimate(model, batch):
        seen.append(batch)
        return Importances([torch.ones(len(units)) for units in batch.units], signed=True)

    cls, record = record_generations()
    train(cls, trainer={"counterfactual": CounterfactualConfig(estimator=estimate, units="tokens")})
    (batch,), ((before, output, _),) = seen, record
    assert len(batch.groups.unique()) == 1
    rewards = batch.rewards
    assert set(rewards.tolist()) == {0.0, 1.0}
    torch.testing.assert_close(batch.advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    mask = output["completion_mask"].bool()
    added = output["advantages"] - before[:, None]
    assert added[mask].eq(1).all() or added[mask].sub(1).abs().max() < 1e-6
    assert added[~mask].eq(0).all()


def test_rows_that_no_function_rewards_are_no_siblings(train):
    def some(completions, **_):
        return [None if i < 2 else float(i % 2) for i in range(len(completions))]

    seen = []

    def estimate(model, batch):
        seen.append(batch)
        return Importances([torch.zeros(len(units)) for units in batch.units])

    config = CounterfactualConfig(estimator=estimate, units="tokens", weights="identity")
    train(trainer={"counterfactual": config, "reward_funcs": some})
    assert seen[0].rewards.tolist() == [0.0, 1.0] * 3


def test_groups_that_are_split_between_processes_and_numbers_that_nobody_gives_are_refused(tmp_path, monkeypatch):
    with pytest.raises(NotImplementedError, match=r"estimator='external': .*; give a function"):
        build(str(tmp_path), trainer={"counterfactual": CounterfactualConfig(estimator="external")})
    import cfa_kernels.integrations.trl as integration

    made = build(str(tmp_path), trainer={"counterfactual": CounterfactualConfig(estimator="prefix_tree")})
    monkeypatch.setattr(type(made.accelerator), "num_processes", 2)
    made.args.per_device_train_batch_size = 4
    made.args.steps_per_generation = 1
    assert any("groups of 8 are split" in line for line in integration._credit_obstacles(made))
