"""Credit is that of the whole batch, however it is cut into micro-batches and processes."""

import pytest
import torch

from cfa_kernels import BatchKeys, DeferredCredit, counterfactual_credit, token_entropies
from tests.support.embedded import COMPARING, advantages_of
from trainer.metrics import StageTimes
from trainer.state import Shaped
from trainer.step import update, update_batch

GROUPS = torch.arange(32) // 8


def left_out() -> torch.Tensor:
    """One row of the first group and all but one of the last are not counted; groups 1 and 2 have no advantage."""
    counted = torch.ones(32, dtype=torch.bool)
    counted[[1, *range(24, 31)]] = False
    return counted


@pytest.mark.parametrize(
    ("case", "counted", "budget"),
    [
        *((case, left_out(), 1) for case in (*COMPARING, "masking", "gradient")),
        ("top of entropies", torch.ones(32, dtype=torch.bool), 100_000),
        ("a function", torch.ones(32, dtype=torch.bool), 1),
    ],
)
def test_micro_batches_and_rows_left_out_change_no_credit(fresh, rollouts, case, counted, budget, monkeypatch) -> None:
    trainer = fresh(f"--token_budget={budget}", "--no_use_peft", *COMPARING.get(case, [f"--estimator={case}"]))
    rewards = (torch.arange(32) % 3 == 0).float()
    advantages = advantages_of(rollouts)
    mask = [some.expand(n).float() for some, n in zip(counted, rollouts.rows.lengths, strict=True)]
    config = trainer.config.counterfactual()
    entropies = None
    if config.reads_entropies:
        entropies = token_entropies(trainer.policy, rollouts.rows, temperature=trainer.config.temperature)
    expected = counterfactual_credit(
        trainer.policy, trainer.tokenizer, rollouts.rows, advantages=advantages, config=config, rewards=rewards,
        seed=BatchKeys(trainer.config.seed).key(1), groups=GROUPS, entropies=entropies, mask=mask,
    )  # fmt: skip
    batch = update_batch(trainer.config, rollouts, advantages, Shaped(rewards)).with_columns(mask=mask)
    if case in COMPARING and budget == 1:  # before a micro-batch's forward, whose graph would wait for all credit
        monkeypatch.delattr(DeferredCredit, "by_forward")
    credit, *_ = update(trainer, 1, rollouts, batch, StageTimes())
    fed = (counted & (advantages != 0)).nonzero().flatten().tolist()
    some = [False]
    for b in fed:
        ours, theirs = ((one.advantages or one.weights)[b] for one in (credit, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        some.append(bool((theirs != (advantages[b] if expected.advantages else 1)).any()))
    assert any(some), "this credit does nothing"
    assert [len(row) > 0 for row in credit.spans] == [b in fed and bool(expected.spans[b]) for b in range(32)]
