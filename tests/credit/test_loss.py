"""`credited_loss` is credit and then the packed loss, from one forward."""

import pytest
import torch

from cfa_kernels import (
    CounterfactualConfig,
    KeptTokens,
    counterfactual_credit,
    credited_loss,
    packed_policy_loss,
    token_entropies,
)
from cfa_kernels.model import tree_forward
from cfa_kernels.scoring import packed
from tests.support.log_prob_hosts import REWARDS, batch_rows
from tests.support.models import gradients
from tests.support.tiny import tiny_model, tiny_tokenizer

ROWS, ADVANTAGES = batch_rows(), torch.tensor([1.0, -0.5, 0.0, 0.7, -1.0, 1.0])
OTHERS = {"loss_type": "dapo", "epsilon_high": 0.28, "temperature": 0.9, "num_items_in_batch": 20}


@pytest.mark.parametrize("credit", ["cf", "prefix_gain_positive", "prefix_tree", "entropy_80_20"])
def test_it_is_credit_and_then_the_packed_loss(credit):
    model, tokenizer = tiny_model().eval().double(), tiny_tokenizer()
    mask = [torch.ones(n) for n in ROWS.lengths]
    mask[4][1] = 0
    given = {"mask": mask, "rewards": torch.tensor(REWARDS)}
    config = CounterfactualConfig.preset(credit)
    entropies = None
    if config.reads_entropies:
        entropies = token_entropies(model, ROWS, temperature=0.9)
    found = counterfactual_credit(
        model, tokenizer, ROWS, advantages=ADVANTAGES, config=config, seed=3, entropies=entropies, **given
    )
    signed = ADVANTAGES if found.advantages is None else found.advantages
    expected = packed_policy_loss(model, ROWS, advantages=signed, weights=found.weights, mask=mask, **OTHERS)
    result = credited_loss(model, tokenizer, ROWS, advantages=ADVANTAGES, credit=credit, seed=3, **given, **OTHERS)
    torch.testing.assert_close(result.credit.weights, found.weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradients(model, result.loss), gradients(model, expected.loss), rtol=1e-5, atol=1e-8)
    assert result.credit.spans == found.spans
    assert result.metrics["credit/spans_mean"] == found.metrics(mask)["credit/spans_mean"]
    assert result.metrics.keys() >= expected.metrics.keys()


def test_masking_continues_the_forward_of_the_loss(monkeypatch, unchecked):
    fed, run = [], tree_forward.packed_hidden
    for module in (packed, tree_forward):
        monkeypatch.setattr(module, "packed_hidden", lambda *of, **how: fed.append(of[1].num_tokens) or run(*of, **how))
    result = credited_loss(tiny_model(), tiny_tokenizer(), ROWS, advantages=ADVANTAGES, credit="cf")
    assert len(fed) == 2
    assert fed[1] == result.credit.work.tokens_fed


def test_entropies_are_the_callers_or_those_over_the_kept_ids():
    model, tokenizer = tiny_model().eval(), tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(n, generator=generator) for n in ROWS.lengths]
    config, options = (
        CounterfactualConfig.of({"estimator": "entropy", "weights.fraction": 0.3}),
        {"advantages": ADVANTAGES},
    )
    ours = counterfactual_credit(None, tokenizer, ROWS, config=config, entropies=given, **options)
    found = credited_loss(model, tokenizer, ROWS, credit=config, entropies=given, **options)
    assert all(map(torch.equal, found.credit.weights, ours.weights))
    own = credited_loss(model, tokenizer, ROWS, credit=config, **options)
    assert not all(map(torch.equal, own.credit.weights, ours.weights))
    kept = [KeptTokens.of([sorted({int(token), 3, 4}) for token in row]) for row in ROWS.completions]
    config = CounterfactualConfig.of({"estimator": "entropy_shaping", "estimator.alpha": 0.1})
    expected = token_entropies(model, ROWS, kept_tokens=kept)
    by_hand = counterfactual_credit(None, tokenizer, ROWS, config=config, entropies=expected, **options)
    found = credited_loss(model, tokenizer, ROWS, credit=config, kept_tokens=kept, **options)
    torch.testing.assert_close(found.credit.advantages, by_hand.advantages, rtol=1e-5, atol=1e-6)
    assert max(float(row.max()) for row in expected) < 1.1 < max(map(float, token_entropies(model, ROWS)[0]))
