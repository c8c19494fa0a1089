"""Every estimator runs in the training program, from flags or from the settings of a paper that ship with it."""

from dataclasses import dataclass

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.presets import preset_names
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.estimators.entropy import Entropy
from cfa_kernels.integrations.credit import OFFERS, unmet_needs
from cfa_kernels.options import Share, check_fields
from docs.options import options
from tests.support.embedded import settings, updated

pytestmark = pytest.mark.slow

REWARDS = torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0] + [0.0] * 8 + [1.0] * 8 + [1.0, 1, 1, 0, 1, 1, 1, 1])


def credit_under(trainer, rollouts):
    return updated(trainer, rollouts, rewards=REWARDS)


def named(options) -> list[str]:
    """Flags of options of credit."""
    return [f"--{path}={value}" for path, value in options.items()]


def test_every_setting_of_credit_reaches_the_library() -> None:
    """Those the program has; the others are the library's defaults."""
    gradient = {
        "units": "spans", "estimator.outcome": "last", "weights": "bilevel", "weights.tau": 0.3,
        "weights.boost": 1.5, "weights.floor": 0.1, "estimator.sigma": 0.01, "estimator.samples": 2,
        "normalize": "mean",
    }  # fmt: skip
    credit = settings("--control=inverted", "--estimator=gradient", *named(gradient)).counterfactual()
    assert credit == CounterfactualConfig.of({"control": "inverted", "estimator": "gradient", **gradient})
    drops = {"estimator.mask": "drop", "estimator.preselect": 0.5, "estimator.preselect_by": "gradient"}
    assert settings(*named(drops)).counterfactual() == CounterfactualConfig.of(drops)
    assert settings().counterfactual() == CounterfactualConfig()
    for control in ("off", "permuted", "random"):
        assert settings(f"--control={control}").counterfactual().control == control


@dataclass(frozen=True)
class Prepared(Entropy):
    """An estimator with an option of its own."""

    name = "prepared"

    care: Share = 0.25
    """How much care is taken."""

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_field_added_to_a_part_is_a_setting_of_yaml_and_an_option_of_every_trainer(monkeypatch) -> None:
    """It is declared once; here an estimator is put in beside the others, and nothing else is told of it."""
    monkeypatch.setitem(ESTIMATORS, "prepared", Prepared)
    ours = settings("--estimator=prepared", "--estimator.care=0.75").counterfactual()
    assert ours.estimator == Prepared(care=0.75)
    assert "| `estimator.care` | `prepared` | `0.25` | How much care is taken. |" in options()
    assert not unmet_needs(ours, OFFERS["TRL"])
    (refusal,) = unmet_needs(ours, OFFERS["OpenRLHF"])
    assert refusal.startswith("estimator='prepared': it needs the entropy of each sampled token")


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
