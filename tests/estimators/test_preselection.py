"""Approximations of masking: what they compute is exact, what they leave out is stated, and both are compared."""

import copy

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cfa_kernels.estimators.preselection import (
    ImportanceCache,
    cheap_estimates,
    compare_to_exact,
    preselected_masking,
    proxy_scores,
    run_units,
    top_units,
)
from cfa_kernels.scoring.masked import ScoringWork, score_counterfactuals
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, batch, make_model, naive
from tests.support.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def qwen3():
    return make_model("Qwen3")


@pytest.mark.parametrize(
    ("values", "share", "top"),
    [
        ([1, 3, 2, 3], 0.5, [1, 3]),
        ([1, 3, 2, 3], 0.25, [1]),
        ([1, 3, 2, 3], 0.01, [1]),
        ([0, 0, 0], 0.67, [0, 1]),
        ([5], 1, [0]),
        ([], 0.5, []),
    ],
)
def test_the_top_units_are_the_largest_the_earlier_of_equals(values, share, top):
    assert top_units(torch.tensor([float(value) for value in values]), share) == top


def test_cheap_estimates_rank_by_length_or_position():
    units = [[Span(0, 2), Span(3, 9), Span(9, 10)], []]
    for name, ranked in (("length", [1, 0, 2]), ("first", [0, 1, 2]), ("last", [2, 1, 0])):
        assert cheap_estimates(name, units)[0].argsort(descending=True).tolist() == ranked
    assert len(cheap_estimates("length", units)[1]) == 0
    with pytest.raises(ValueError, match="name must be one of length, first, last, got 'middle'"):
        cheap_estimates("middle", units)


def test_preselected_units_are_masked_exactly_and_the_others_claim_nothing(qwen3):
    prompts, completions, spans, answers = batch()
    cheap = cheap_estimates("length", spans)
    cost = ScoringWork(1, 20, 30, 4)
    found = preselected_masking(
        qwen3, prompts, completions, spans, answers, cheap, share=0.5, cheap_work=cost, placeholder_id=PLACEHOLDER
    )
    masked = [row.nonzero().flatten().tolist() for row in found.exact]
    assert masked == [[0, 1], [1], [0], [0], [1], [], [1]]
    for b, answer in enumerate(answers):
        for k, span in enumerate(spans[b]):
            if answer is None and found.exact[b][k]:
                assert torch.isnan(found.importance[b][k])
            elif not found.exact[b][k]:
                assert found.importance[b][k] == 0
            elif span.start < answer.start:
                base = naive(qwen3, prompts[b], completions[b], answer)
                drop = naive(qwen3, prompts[b], completions[b], answer, span) - base
                assert abs(found.importance[b][k].item() + drop) < 4e-5
    whole = score_counterfactuals(qwen3, prompts, completions, spans, answers, placeholder_id=PLACEHOLDER)
    assert found.work.tokens_fed - cost.tokens_fed < whole.work.tokens_fed
    assert found.work.forwards == 2


def test_units_that_are_not_masked_take_what_they_are_given(qwen3):
    prompts, completions, spans, answers = batch()
    cheap, others = cheap_estimates("length", spans), cheap_estimates("last", spans)
    found = preselected_masking(
        qwen3, prompts, completions, spans, answers, cheap, others=others, share=0.5, placeholder_id=PLACEHOLDER
    )
    assert found.importance[0][2:].tolist() == [14, 18]
    assert found.importance[0][:2].tolist() != [1, 3]


@pytest.mark.parametrize("outcome", ["logprob", "mean"])
def test_preselecting_all_units_is_exact(qwen3, outcome):
    prompts, completions, spans, answers = batch()
    cheap, options = cheap_estimates("last", spans), {"placeholder_id": PLACEHOLDER, "outcome": outcome}
    found = preselected_masking(qwen3, prompts, completions, spans, answers, cheap, share=1, **options)
    whole = score_counterfactuals(qwen3, prompts, completions, spans, answers, **options)
    for ours, drop in zip(found.importance, whole.drop, strict=True):
        torch.testing.assert_close(ours, -drop.cpu(), rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("row", "estimate", "share", "message"),
    [
        (1, torch.zeros(2), 0.5, r"cheap row 1: must be \(3,\), one per unit, got shape \(2,\)"),
        (1, torch.tensor([0, float("nan"), 0]), 0.5, "cheap row 1: importance, unit 1: must be finite, got nan"),
        (1, torch.zeros(3), 0.0, r"cheap row 0: share must be in \(0, 1\], got 0.0"),
        (1, torch.zeros(3), 1.5, r"share must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_estimates_are_refused_by_row_and_unit(qwen3, row, estimate, share, message):
    prompts, completions, spans, answers = batch()
    cheap = cheap_estimates("length", spans)
    cheap[row] = estimate
    with pytest.raises(ValueError, match=message):
        preselected_masking(qwen3, prompts, completions, spans, answers, cheap, share=share, placeholder_id=PLACEHOLDER)


@pytest.mark.parametrize(
    ("end", "length", "start", "units"),
    [(7, 3, 0, [(0, 3), (3, 6), (6, 7)]), (4, 1, 2, [(2, 3), (3, 4)]), (0, 2, 0, []), (3, 8, 0, [(0, 3)])],
)
def test_runs_cover_the_reasoning_without_gaps(end, length, start, units):
    assert run_units(end, length, start=start) == [Span(*unit) for unit in units]


def test_bad_runs_are_refused_by_value():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        run_units(3, 0)
    with pytest.raises(ValueError, match=r"start must be in \[0, 3\], got 4"):
        run_units(3, 1, start=4)


def test_a_proxy_scores_the_same_ids(qwen3):
    proxy = make_model("Llama", num_hidden_layers=1)
    prompts, completions, spans, answers = batch()
    tokenizer = tiny_tokenizer()
    found = proxy_scores(
        proxy, prompts, completions, spans, answers, tokenizer=tokenizer, proxy_tokenizer=tiny_tokenizer(),
        placeholder_id=PLACEHOLDER,
    )  # fmt: skip
    assert abs(found.base[0].item() - naive(proxy, prompts[0], completions[0], answers[0])) < 2e-5


def test_a_proxy_with_other_ids_is_refused_by_token(qwen3):
    other = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tiny_tokenizer().backend_tokenizer))
    other.add_tokens(["seven"])
    with pytest.raises(ValueError, match="proxy_tokenizer: token 'seven' has id 20 in it and None in tokenizer"):
        proxy_scores(qwen3, *batch(), tokenizer=tiny_tokenizer(), proxy_tokenizer=other, placeholder_id=PLACEHOLDER)


def kept_rows(cache, rows, version=0, options="cf", units=None):
    """What the cache gives for rows of two tokens, the first their number, and which rows it had to compute."""
    asked = []

    def compute(missing):
        asked.extend(rows[i] for i in missing)
        return [torch.tensor([float(rows[i] + version)]) for i in missing]

    ids = [torch.tensor([row, 1]) for row in rows]
    values = cache.importances(
        ids, ids, units or [[Span(0, 1)]] * len(rows), [None] * len(rows), compute, options=options, version=version
    )
    return [value.item() for value in values], asked


def test_the_cache_computes_what_it_does_not_have():
    cache = ImportanceCache(10)
    assert kept_rows(cache, [4, 5]) == ([4, 5], [4, 5])
    assert kept_rows(cache, [5, 6, 4]) == ([5, 6, 4], [6])
    assert kept_rows(cache, [5], options="oar") == ([5], [5])
    assert kept_rows(cache, [5], units=[[Span(0, 2)]]) == ([5], [5])
    assert (cache.hits, cache.misses) == (2, 5)


@pytest.mark.parametrize(("max_age", "value"), [(0, 6), (1, 5), (None, 5)])
def test_the_cache_hands_out_no_more_than_the_age_that_is_allowed(max_age, value):
    cache = ImportanceCache(10, max_age=max_age)
    kept_rows(cache, [5])
    assert kept_rows(cache, [5], version=1)[0] == [value]
    assert kept_rows(cache, [5], version=3)[0] == [5 if max_age is None else 8]


def test_the_cache_forgets_the_least_recently_used_row():
    cache = ImportanceCache(2)
    kept_rows(cache, [1, 2])
    kept_rows(cache, [1])
    kept_rows(cache, [3])
    assert len(cache) == 2
    assert kept_rows(cache, [1, 3, 2])[1] == [2]


def test_what_the_cache_hands_out_can_be_changed_without_harm():
    cache, ids = ImportanceCache(2), [torch.tensor([1])]

    def ask():
        return cache.importances(ids, ids, [[Span(0, 1)]], [None], lambda _: [torch.ones(1)], options=0, version=0)[0]

    ask().zero_()
    ask().zero_()
    assert ask() == 1


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda _: [], "compute must give the 1 rows that it is asked for, got 0"),
        (lambda _: [torch.zeros(2)], r"compute, row 0: must be \(1,\), got shape \(2,\)"),
    ],
)
def test_what_a_cache_cannot_keep_is_refused(compute, message):
    ids = [torch.tensor([1])]
    with pytest.raises(ValueError, match=message):
        ImportanceCache(2).importances(ids, ids, [[Span(0, 1)]], [None], compute, options=0, version=0)
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        ImportanceCache(0)
    with pytest.raises(ValueError, match="max_age must not be negative, got -1"):
        ImportanceCache(1, max_age=-1)


def test_agreement_is_the_mean_rank_correlation_beside_the_share_of_tokens():
    exact = [torch.tensor(row) for row in ([1.0, 2.0, 3.0], [3.0, 1.0], [1.0, 2.0], [2.0, 2.0], [5.0])]
    exact.append(torch.full((2,), float("nan")))
    ours = [torch.tensor(row) for row in ([1.0, 3.0, 2.0], [9.0, 0.0], [0.0, 0.0], [1.0, 2.0], [0.0], [0.0, 1.0])]
    work, exact_work = ScoringWork(1, 140, 0, 0), ScoringWork(1, 500, 0, 0)
    found = compare_to_exact("half", ours, exact, work=work, exact_work=exact_work, shared_tokens=100)
    assert found.spearman.value == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.spearman.low <= found.spearman.value <= found.spearman.high
    ranks = torch.tensor([[4, 6, 5, 7, 2, 2, 2], [2, 4.5, 6.5, 6.5, 2, 2, 4.5]])
    assert found.pooled == pytest.approx(torch.corrcoef(ranks)[0, 1].item())
    assert found.top == pytest.approx((0 + 1 + 0.5) / 3)
    assert (found.name, found.completions, found.cost) == ("half", 3, 0.1)


@pytest.mark.parametrize(
    ("ours", "exact", "message"),
    [
        ([], [torch.zeros(2)], "approximate has 0 rows, exact has 1"),
        ([torch.zeros(3)], [torch.zeros(2)], r"approximate row 0: has shape \(3,\), exact has \(2,\)"),
        ([torch.zeros(2)], [torch.zeros(2)], "exact: no completion has two units or more that are not all equal"),
    ],
)
def test_agreement_needs_something_to_agree_on(ours, exact, message):
    work = ScoringWork(1, 1, 1, 1)
    with pytest.raises(ValueError, match=message):
        compare_to_exact("x", ours, exact, work=work, exact_work=work)
