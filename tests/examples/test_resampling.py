"""Resampled fills follow the model's own distribution in the unit's place, and score as full forwards would."""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cfa_kernels.batch import ScoredRow
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.span import Span
from examples.estimators.resampling import Resampling, _Fill, draw_fills
from tests.support import models
from tests.support.models import HYBRIDS, batch_of, make_model, score_columns, tokens

pytestmark = pytest.mark.slow


def batch():
    """The shared batch, with spans of at most three tokens."""
    prompts, completions, spans, answers = models.batch()
    return prompts, completions, [[Span(start, min(end, start + 3)) for start, end in row] for row in spans], answers


def fills_of(model, prompts, completions, spans, *, seed, token_budget=None, index=None, samples=1):
    """Ids as tensors, in the order of `completions`, and what they took."""
    rows = batch_of(model, prompts, completions, spans, token_budget=token_budget, seed=(seed,), index=index)
    fills, work = draw_fills(InProcess(model), rows, samples)
    assert all(ids.dtype == np.int64 for row in fills for ids in row)
    return [list(map(torch.from_numpy, row)) for row in fills], work


def scores_of(model, *data, seed, samples=1, outcome):
    rows = batch_of(model, *data, seed=(seed,))
    found = Resampling(outcome, samples)(InProcess(model), rows)
    return SimpleNamespace(drop=[row.double() for row in found.values], work=found.work)


copied = functools.cache(copy.deepcopy)


def chances(model, ids):
    """(V,) float64 distribution of the token after `ids`, by one plain forward."""
    exact = copied(model).double().eval()
    with torch.no_grad():
        return exact(input_ids=ids[None].to(exact.device)).logits[0, -1].double().cpu().softmax(-1)


@pytest.mark.parametrize("name", ["Qwen3", "Lfm2"])
def test_every_fill_token_is_drawn_from_the_model_given_what_stands_before_it(name):
    model = make_model(name, initializer_range=0.1, **HYBRIDS.get(name, {}))
    prompts, completions = tokens(7, 7), tokens(9, 12, seed=1)
    spans = [[Span(4, 7), Span(0, 2)], [Span(10, 12)]]
    fills, _ = fills_of(model, prompts, completions, spans, seed=3)
    for b, (prompt, completion, row, row_fills) in enumerate(zip(prompts, completions, spans, fills, strict=True)):
        for span, fill in zip(row, row_fills, strict=True):
            context = torch.cat([prompt, completion[: span.start]])
            draws = _Fill(ScoredRow(prompt.numpy(), completion.numpy(), [], None, b), span, (3,), 0).draws
            assert len(fill) == len(draws) == span.end - span.start
            for i, (token, draw) in enumerate(zip(fill.tolist(), draws.tolist(), strict=True)):
                p = chances(model, torch.cat([context, fill[:i]]))
                before = p[:token].sum()
                assert before - 1e-4 <= draw <= before + p[token] + 1e-4


def test_fills_differ_by_seed_and_not_by_batch():
    model = make_model("Qwen3").cpu().double()  # whose rounding moves no draw from one token to the next
    prompts, completions, spans, _ = batch()
    together, _ = fills_of(model, prompts, completions, spans, seed=0)
    for b in (0, 4, 6):
        (alone,), _ = fills_of(model, prompts[b : b + 1], completions[b : b + 1], spans[b : b + 1], seed=0, index=[b])
        assert all(map(torch.equal, alone, together[b]))
    small, _ = fills_of(model, prompts, completions, spans, seed=0, token_budget=1)
    for row, alone in zip(together, small, strict=True):
        assert all(map(torch.equal, row, alone))
    other, _ = fills_of(model, prompts, completions, spans, seed=1)
    assert not any(map(torch.equal, other[1], together[1]))


@pytest.mark.parametrize("outcome", ["logprob", "last"])
def test_resampled_scores_are_means_over_the_fills(outcome):
    model = make_model("Qwen3").cpu().double()  # whose rounding moves no draw from one token to the next
    prompts, completions, spans, answers = data = batch()
    found = scores_of(model, *data, seed=5, samples=3, outcome=outcome)
    once = scores_of(model, *data, seed=5, outcome=outcome)
    fills, work = fills_of(model, prompts, completions, spans, seed=5)
    first = score_columns(model, *data, mask=lambda row, k: fills[row.index][k], outcome=outcome)
    tripled = [row * 3 for row in spans]
    drawn, _ = fills_of(model, prompts, completions, spans, seed=5, samples=3)
    every = score_columns(
        model, prompts, completions, tripled, answers, mask=lambda row, k: drawn[row.index][k], outcome=outcome
    )
    for b, row in enumerate(spans):
        torch.testing.assert_close(once.drop[b], first.drop[b], rtol=0, atol=2e-5, equal_nan=True)
        assert all(map(torch.equal, drawn[b][: len(row)], fills[b]))
        means = every.drop[b].view(3, len(row)).mean(0)
        torch.testing.assert_close(found.drop[b], means, rtol=0, atol=2e-5, equal_nan=True)
    assert not torch.equal(drawn[1][0], drawn[1][3])
    assert once.work == first.work + work
    assert found.work.tokens_fed > once.work.tokens_fed
