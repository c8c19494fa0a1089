"""The reason for which a batch taught nothing, or few of its completions got credit, is named with what to change."""

import math

import pytest
import torch

from cfa_kernels import Batch, CounterfactualConfig, DeferredCredit, Rows
from cfa_kernels.credit.nothing import why_nothing
from tests.support.log_prob_hosts import batch_rows
from tests.support.tiny import tiny_model, tiny_tokenizer

UNANSWERED = 2  # the one row without an answer
ALL, NONE = [True] * 6, [False] * 6


def reason(advantages, truncated=NONE, *, masked=False, rewards=1.0, rows=None, **options):
    rows = rows or batch_rows()
    counted = [torch.full((n,), float(not (masked and cut))) for n, cut in zip(rows.lengths, truncated, strict=True)]
    config = CounterfactualConfig.of(options)
    batch = Batch(rows, advantages=torch.tensor(advantages), rewards=[rewards] * len(rows), mask=counted)
    deferred = DeferredCredit(config, tiny_tokenizer(), batch, seed=0)
    deferred.by_model(tiny_model())
    return why_nothing(deferred, deferred.finished(), truncated)


def only(*rows, of=6, value=1.0, other=0.0):
    return [value if b in rows else other for b in range(of)]


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"advantages": only(2)}, "of 1 completions with an advantage none was scored: no answer was found. Answers"),
        (
            {"advantages": only(2, other=-1.0), "completions": "positive"},
            "of 1 completions with a positive advantage none was scored: no answer was found. Answers",
        ),
        ({"advantages": [-1.0] * 6, "completions": "positive"}, None),
        ({"advantages": only(2), "rewards": math.nan}, None),
        ({"advantages": only(0)}, None),
    ],
    ids=["no answer", "no answer where positive", "none positive", "no reward", "answer"],
)
def test_only_completions_that_are_to_be_judged_can_lack_an_answer(options, warning):
    problem = reason(**options)
    assert problem is None if warning is None else warning in problem.sentence


def test_few_judged_completions_are_told_too():
    rows = batch_rows()
    places = [0, *[UNANSWERED] * 9]
    many = Rows([rows.prompts[b] for b in places], [rows.completions[b] for b in places])
    problem = reason([1.0] * 10, [False] * 10, rows=many)
    assert problem.what == "no answer in most"
    assert "of 10 completions with an advantage only 1 was scored: no answer was found" in problem.sentence
    few = Rows(many.prompts[:5], many.completions[:5])
    assert reason([1.0] * 5, [False] * 5, rows=few) is None


@pytest.mark.parametrize(
    ("options", "what", "change"),
    [
        ({"advantages": [0.0] * 6}, "no mixed group", "num_generations"),
        ({"advantages": [1.0] * 6, "truncated": ALL, "masked": True}, "all truncated", "max_completion_length"),
        ({"advantages": [0.0] * 6, "truncated": ALL, "masked": True}, "all truncated", "max_completion_length"),
        ({"advantages": [0.0] * 6, "truncated": ALL}, "no mixed group", "num_generations"),
        (
            {"advantages": only(0), "truncated": only(0, value=True, other=False), "masked": True},
            "advantages on truncated only", "max_completion_length",
        ),
        (
            {"advantages": only(0), "weights.w_min": 1.0, "weights.w_max": 1.0, "weights.w_answer": 1.0},
            "all weights 1", "detector",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_teaches_nothing_says_which_and_what_to_change(options, what, change):
    problem = reason(**options)
    assert problem.what == what
    assert change in problem.sentence
