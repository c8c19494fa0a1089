"""Every estimator runs in the training program, from flags or from the settings of a paper that ship with it."""

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.presets import preset_names
from tests.support.embedded import settings, updated

pytestmark = pytest.mark.slow

REWARDS = torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0] + [0.0] * 8 + [1.0] * 8 + [1.0, 1, 1, 0, 1, 1, 1, 1])


def credit_under(trainer, rollouts):
    return updated(trainer, rollouts, rewards=REWARDS)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_found_by_name_and_flags_win_over_it(name) -> None:
    config = settings(f"--credit={name}", "--normalize=mean")
    assert config.counterfactual() == CounterfactualConfig.of({"preset": name, "normalize": "mean"})


@pytest.mark.parametrize("estimator", ["masking", "gradient"])
def test_an_estimator_judges_the_rows_with_advantage_of_a_micro_batch(fresh, rollouts, estimator) -> None:
    """Two of the four groups are mixed. One micro-batch for each, as credit must not mix them up."""
    trainer = fresh(f"--estimator={estimator}", "--token_budget=1")
    credit, metrics = credit_under(trainer, rollouts)
    judged = [b for b, units in enumerate(credit.spans) if units]
    assert {b // 8 for b in judged} == {0, 3}
    assert [len(row) for row in credit.drop] == [len(row) for row in credit.spans]
    assert torch.cat(credit.weights[8:24]).eq(1).all()
    assert torch.isfinite(torch.tensor(metrics["loss"]))
    assert torch.cat([credit.weights[b] for b in judged]).std() > 0


def test_signed_credit_changes_the_update_as_its_advantages_say(fresh, rollouts) -> None:
    gradients = []
    for control in ((), ("--control=off",), ("--control=inverted",)):
        trainer = fresh("--estimator=entropy_shaping", *control, "--max_grad_norm=1e9")
        credit_under(trainer, rollouts)
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.policy.parameters()]))
    forth, plain, back = gradients
    assert (forth - plain).norm() > 1e-3 * plain.norm()
    torch.testing.assert_close(forth - plain, plain - back, rtol=1e-3, atol=1e-4 * plain.abs().max().item())


def test_micro_batches_keep_the_share_of_entropies_of_the_batch(fresh, rollouts) -> None:
    trainer = fresh("--credit", "entropy_80_20", "--token_budget=1")
    credit, _ = credit_under(trainer, rollouts)
    judged = [b for b, units in enumerate(credit.spans) if units]
    weights = torch.cat([credit.weights[b] for b in judged])
    assert weights.mean() == pytest.approx(0.2, abs=0.01)
    assert set(weights.tolist()) == {0.0, 1.0}
