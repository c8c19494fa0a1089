"""The warning of TRL's trainer that a generation batch got no credit, of which nothing imports TRL."""

import math

import pytest
import torch

from cfa_kernels import CounterfactualConfig, DeferredCredit
from cfa_kernels.integrations.trl_credit import why_nothing
from tests.support.log_prob_hosts import batch_rows
from tests.support.tiny import tiny_model, tiny_tokenizer

UNANSWERED = 2  # the one row without an answer


@pytest.mark.parametrize(
    ("completions", "advantage", "others", "rewards", "warning"),
    [
        ("all", 1.0, 0.0, 1.0, "of 1 completions with an advantage none was judged: no answer was found"),
        ("positive", 1.0, -1.0, 1.0, "of 1 completions with a positive advantage none was judged: no answer was found"),
        ("positive", -1.0, -1.0, 1.0, None),
        ("all", 1.0, 0.0, math.nan, None),
    ],
    ids=["no answer", "no answer where positive", "none positive", "no reward"],
)
def test_only_completions_that_are_to_be_judged_can_lack_an_answer(completions, advantage, others, rewards, warning):
    config, advantages = CounterfactualConfig(completions=completions), torch.full((6,), others)
    advantages[UNANSWERED] = advantage
    batch = DeferredCredit(config, tiny_tokenizer(), batch_rows(), advantages, seed=0, rewards=[rewards] * 6)
    batch.by_model(tiny_model())
    problem = why_nothing(batch, batch.finished())
    assert problem is None if warning is None else warning in problem
