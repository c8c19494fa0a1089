"""OpenRLHF's experience maker with counterfactual credit; a stand-in of its interface takes its place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cfa_kernels.integrations.openrlhf as integration
from cfa_kernels import CounterfactualConfig, pad_rows
from cfa_kernels.integrations.openrlhf import CounterfactualMixin
from tests.support.log_prob_hosts import CREDIT, PROMPTS, REWARDS, completions, credited
from tests.support.openrlhf_host import Host

pytestmark = pytest.mark.slow


def experiences() -> list[Any]:
    """Six rollouts in two padded batches, as OpenRLHF concatenates them; one has a tool's token."""
    made = []
    for rows in (range(4), range(4, 6)):
        ids = [torch.tensor(PROMPTS[i] + completions()[i]) for i in rows]
        actions = [torch.tensor([0] * (len(PROMPTS[i]) - 1) + [1] * len(completions()[i])) for i in rows]
        if 1 in rows:
            actions[1][len(PROMPTS[1])] = 0
        made.append(SimpleNamespace(
            sequences=pad_rows(ids), attention_mask=pad_rows([torch.ones_like(row) for row in ids]),
            action_mask=pad_rows(actions), index=list(rows), info={}, rewards=torch.tensor([REWARDS[i] for i in rows]),
        ))  # fmt: skip
    return made


def build(credit: CounterfactualConfig | None, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(integration, "require", lambda *args: None)
    return type("Maker", (CounterfactualMixin, Host), {"counterfactual": credit})(**changes)


@pytest.mark.parametrize(
    ("options", "processes", "copies"),
    [({}, 1, 1), ({}, 3, 1), ({}, 4, 2), *((options, 1, 1) for options in CREDIT)],
    ids=str,
)
def test_every_estimator_by_name_does_in_openrlhf_what_it_does_with_the_model_at_hand(
    monkeypatch, options, processes, copies
):
    maker = build(CounterfactualConfig.of(options), monkeypatch, num_gpus_per_node=processes, ring_attn_size=copies)
    given, own = maker.compute_advantages_and_returns(experiences()), experiences()
    Host().compute_advantages_and_returns(own)
    expected = credited(torch.tensor(REWARDS) - 0.5, options)
    rows = [row for one in given for row in one.advantages]
    for b, (before, after) in enumerate(zip([r for one in own for r in one.advantages], rows, strict=True)):
        first, whole = len(PROMPTS[b]) - 1, before.clone()
        whole[first : first + len(completions()[b])] = (
            expected[b, : len(completions()[b])] * (before != 0)[first:][: len(completions()[b])]
        )
        torch.testing.assert_close(after, whole, rtol=1e-4, atol=1e-5)
    assert all(one.info["credit/scored_fraction"].shape == (len(one.sequences),) for one in given)
    by_reward = options.get("estimator") in ("prefix_tree", "sibling_edits")
    assert [all(len(ids) <= 2 for ids in call) for call in maker.calls] == [] if by_reward else [True]


def test_draws_follow_from_the_seed_and_the_step_that_the_trainer_sets(monkeypatch):
    def drawn(*steps: int) -> list[Tensor]:
        maker, found = build(CounterfactualConfig(control="random"), monkeypatch), []
        for step in steps:
            maker.global_step = step
            made = maker.compute_advantages_and_returns(experiences())
            found.append(torch.cat([one.advantages.flatten() for one in made]))
        return found

    first, second, third = drawn(0, 0, 1)
    assert torch.equal(drawn(1)[0], third)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize(
    ("options", "changes", "fragment"),
    [
        ({"estimator": "entropy"}, {}, "estimator='entropy': it needs the entropy of each"),
        ({"estimator": "sibling_edits"}, {"n_samples_per_prompt": 1}, "it needs several completions"),
        ({}, {"policy_loss_type": "gspo"}, "--actor.policy_loss_type gspo: a completion has one ratio there"),
        ({}, {"init_coef": 0.1}, "a KL term in the reward; use --algo.kl.use_loss"),
        ({}, {"init_coef": 0.1, "use_loss": True}, None),
        ({}, {"max_images_per_prompt": 2}, "images (--data.max_images_per_prompt 2)"),
    ],
    ids=str,
)
def test_what_credit_cannot_be_combined_with_is_refused_by_name_unless_it_is_off(
    monkeypatch, options, changes, fragment
):
    build(None, monkeypatch, **changes)
    if fragment is None:
        build(CounterfactualConfig.of(options), monkeypatch, **changes)
        return
    with pytest.raises(NotImplementedError) as refusal:
        build(CounterfactualConfig.of(options), monkeypatch, **changes)
    assert fragment in str(refusal.value)
