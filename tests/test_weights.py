"""span_weights follows the CF paper's equations; counterfactual_weights does the whole way for a padded batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels import weights as module
from cfa_kernels.scoring import CounterfactualScores, ScoringWork
from cfa_kernels.spans import Span
from cfa_kernels.weights import CounterfactualConfig, counterfactual_credit, counterfactual_weights, span_weights
from tests.small_tokenizers import encode, get_tokenizer

SPANS = [Span(1, 3), Span(4, 6), Span(6, 7)]
ANSWER = Span(8, 10)
DROP = torch.tensor([-3.0, -1.0, 1.0])
NOTHING_LEFT = {"w_min": 0.0, "w_max": 0.0, "spans": [Span(0, 4), Span(4, 7), Span(7, 11)], "answer": None}


def test_importances_map_to_the_weight_range_and_the_rest_weighs_one():
    weights = span_weights(DROP, SPANS, ANSWER, 11)
    expected = [1, 4.0, 4.0, 1, 2.25, 2.25, 0.5, 1, 1.5, 1.5, 1]
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert weights.dtype == torch.float32


def test_inverted_gives_the_most_important_span_the_lowest_weight():
    weights = span_weights(DROP, SPANS, ANSWER, 11, mode="inverted")
    torch.testing.assert_close(weights, torch.tensor([1, 0.5, 0.5, 1, 2.25, 2.25, 4.0, 1, 1.5, 1.5, 1]))


def test_uniform_weighs_everything_one_even_the_answer():
    assert span_weights(DROP, SPANS, ANSWER, 11, mode="uniform").eq(1).all()


def test_random_draws_every_reasoning_token_from_the_range_by_the_generator():
    first, again = (
        span_weights(DROP, SPANS, ANSWER, 400, mode="random", generator=torch.Generator().manual_seed(7)) for _ in "ab"
    )
    assert torch.equal(first, again)
    assert first[8:10].tolist() == [1.5, 1.5]
    reasoning = torch.cat([first[:8], first[10:]])
    assert reasoning.unique().numel() > 300
    assert 0.5 <= reasoning.min() < 0.7
    assert 3.8 < reasoning.max() <= 4.0


@pytest.mark.parametrize("mode", ["counterfactual", "inverted"])
@pytest.mark.parametrize("drop", [[-2.0], [-2.0, -2.0, -2.0], [-2.0, -2.0 + 1e-7, -2.0]])
def test_one_span_or_equal_importances_weigh_one(mode, drop):
    weights = span_weights(torch.tensor(drop), SPANS[: len(drop)], ANSWER, 11, mode=mode)
    expected = torch.ones(11)
    expected[8:10] = 1.5
    assert torch.equal(weights, expected)


def test_without_spans_or_answer_everything_weighs_one():
    assert span_weights(torch.zeros(0), [], None, 5).eq(1).all()
    assert span_weights(torch.zeros(0), [], Span(1, 2), 3).tolist() == [1, 1.5, 1]
    assert span_weights(torch.zeros(0), [], None, 0).shape == (0,)


def test_a_token_in_several_spans_takes_the_largest_importance():
    spans = [Span(0, 4), Span(2, 6), Span(7, 8)]
    drop = torch.tensor([-2.0, -1.0, 0.0])
    assert span_weights(drop, spans, None, 9).tolist() == [4.0] * 4 + [2.25] * 2 + [1.0, 0.5, 1.0]
    inverted = span_weights(drop, spans, None, 9, mode="inverted")
    assert inverted.tolist() == [0.5] * 4 + [2.25] * 2 + [1.0, 4.0, 1.0]


drops = st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3)


@given(drops, st.sampled_from(module.MODES), st.sampled_from(module.NORMALIZATIONS), st.floats(0, 2), st.floats(2, 9))
def test_weights_are_finite_never_negative_and_have_mean_one_when_normalised(drop, mode, normalize, w_min, w_max):
    weights = span_weights(
        torch.tensor(drop), SPANS, ANSWER, 11, mode=mode, normalize=normalize, w_min=w_min, w_max=w_max
    )
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    if normalize == "mean":
        assert abs(weights.mean().item() - 1) < 1e-5
    elif mode != "uniform":
        assert weights.max() <= max(w_max, 1.5) * (1 + 1e-6)


@given(drops, st.floats(0.1, 10), st.floats(-5, 5))
def test_only_the_order_and_spacing_of_drops_matter(drop, factor, shift):
    drop = torch.tensor(drop, dtype=torch.float64)
    if drop.max() - drop.min() < 1e-2:
        return
    moved = span_weights(drop * factor + shift, SPANS, ANSWER, 11)
    torch.testing.assert_close(span_weights(drop, SPANS, ANSWER, 11), moved, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "causal"}, "mode must be one of .* got 'causal'"),
        ({"normalize": "sum"}, "normalize must be one of .* got 'sum'"),
        ({"w_min": -1.0}, "w_min must be finite and not negative, got -1.0"),
        ({"w_max": float("inf")}, "w_max must be finite and not negative, got inf"),
        ({"w_answer": float("nan")}, "w_answer must be finite and not negative, got nan"),
        ({"w_min": 5.0}, "w_min must not exceed w_max, got 5.0 and 4.0"),
        ({"drop": DROP[:2]}, r"drop must hold one value per span: got shape \(2,\) for 3 spans"),
        ({"drop": torch.tensor([0.0, float("nan"), 1.0])}, "drop, span 1: must be finite, got nan"),
        ({"spans": [Span(0, 1), Span(3, 3), Span(4, 5)]}, r"spans, span 1: \(3, 3\) is not inside a completion of 11"),
        ({"answer": Span(9, 12)}, r"answer: \(9, 12\) is not inside"),
        ({**NOTHING_LEFT, "normalize": "mean"}, "needs a weight above 0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_and_value(change, message):
    arguments = {"drop": DROP, "spans": SPANS, "answer": ANSWER, "length": 11, **change}
    with pytest.raises(ValueError, match=message):
        span_weights(**arguments)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"mode": "x"}, "mode must be"),
        ({"max_spans": 0}, "max_spans must be at least 1"),
        ({"w_max": 0.1}, "w_min must"),
        ({"detector": "code"}, "detector must be a function or one of math, .*, python, got 'code'"),
        ({"selection": "best"}, "selection must be one of first, longest, even, last, got 'best'"),
        ({"answer_format": "(18"}, r"answer_format: the pattern '\(18' does not compile"),
        ({"answer_format": "18"}, "answer_format: the pattern '18' must have one group"),
        ({"answer_fallback": "first"}, "answer_fallback must be one of .*, got 'first'"),
    ],
)
def test_a_bad_config_is_refused_when_it_is_made(field, message):
    with pytest.raises(ValueError, match=message):
        CounterfactualConfig(**field)


class Tokenizer:
    pad_token_id, eos_token_id = None, 2


@pytest.fixture
def scored(monkeypatch):
    """Stand-ins for detection and scoring, with a record of what was scored."""
    calls = []

    def find_answers(rows, tokenizer, *, answer_format, answer_fallback):
        return {b: Span(len(ids) - 1, len(ids)) if len(ids) > 3 else None for b, ids in rows.items()}

    def find_answers_and_spans(rows, tokenizer, *, detector, max_spans, selection, **options):
        answers = find_answers(rows, tokenizer, **options)
        return {b: (answer, [Span(0, 1), Span(1, 2)] if answer else []) for b, answer in answers.items()}

    def score(model, prompts, completions, spans, answers, *, placeholder_id, token_budget, logprobs, temperature):
        calls.append((prompts, completions, spans, answers, placeholder_id))
        drop = [torch.tensor([-2.0, -1.0])[: len(row)] for row in spans]
        tokens = [row.float() / 10 for row in completions] if logprobs else None
        return CounterfactualScores(torch.zeros(len(prompts)), drop, drop, tokens, ScoringWork(1, 1, 1, 1))

    monkeypatch.setattr(module, "find_answers", find_answers)
    monkeypatch.setattr(module, "find_answers_and_spans", find_answers_and_spans)
    monkeypatch.setattr(module, "score_counterfactuals", score)
    return calls


PROMPTS = torch.tensor([[0, 5, 6], [4, 5, 6], [0, 0, 6], [4, 4, 4]])
PROMPT_MASK = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
COMPLETIONS = torch.tensor([[7, 8, 9, 10, 2], [7, 8, 9, 11, 0], [7, 8, 0, 0, 0], [7, 8, 9, 10, 2]])
COMPLETION_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
ARRAYS = (PROMPTS, PROMPT_MASK, COMPLETIONS, COMPLETION_MASK)


def test_a_padded_batch_is_unpadded_scored_and_weighed_row_by_row(scored):
    weights = counterfactual_weights(None, Tokenizer(), *ARRAYS)
    expected = [[4.0, 0.5, 1, 1, 1.5], [4.0, 0.5, 1, 1.5, 1], [1] * 5, [4.0, 0.5, 1, 1, 1.5]]
    torch.testing.assert_close(weights, torch.tensor(expected))
    ((prompts, completions, _, answers, placeholder),) = scored
    assert [row.tolist() for row in prompts] == [[5, 6], [4, 5, 6], [4, 4, 4]]
    assert [row.tolist() for row in completions] == [[7, 8, 9, 10, 2], [7, 8, 9, 11], [7, 8, 9, 10, 2]]
    assert answers == [Span(4, 5), Span(3, 4), Span(4, 5)]
    assert placeholder == Tokenizer.eos_token_id


@pytest.mark.parametrize("two_dimensional", [False, True])
def test_rows_without_advantage_are_not_scored_and_weigh_one(scored, two_dimensional):
    advantages = torch.tensor([0.0, -1.0, 0.5, 0.0])
    if two_dimensional:
        advantages = advantages[:, None].expand(4, 5)
    weights = counterfactual_weights(None, Tokenizer(), *ARRAYS, advantages=advantages)
    assert weights[[0, 2, 3]].eq(1).all()
    assert weights[1].tolist() == [4.0, 0.5, 1, 1.5, 1]
    assert [len(call[0]) for call in scored] == [1]


@pytest.mark.parametrize("mode", ["uniform", "random"])
def test_modes_that_ignore_the_drops_score_nothing(scored, mode):
    generator = torch.Generator().manual_seed(0)
    config = CounterfactualConfig(mode=mode)
    credit = counterfactual_credit(None, Tokenizer(), *ARRAYS, config=config, generator=generator)
    assert scored == []
    assert credit.work is None
    assert credit.weights[COMPLETION_MASK == 0].eq(1).all()
    if mode == "uniform":
        assert credit.weights.eq(1).all()
    else:
        assert credit.weights[0, 4] == 1.5
        assert credit.weights[2, :2].ne(1).all()


def test_logprobs_cover_every_row_while_branches_cover_those_with_advantage(scored):
    advantages = torch.tensor([0.0, -1.0, 0.0, 0.0])
    credit = counterfactual_credit(None, Tokenizer(), *ARRAYS, advantages=advantages, logprobs=True)
    torch.testing.assert_close(credit.logprobs, COMPLETIONS * COMPLETION_MASK / 10)
    ((_, _, spans, answers, _),) = scored
    assert [len(row) for row in spans] == [0, 2, 0, 0]
    assert answers == [None, Span(3, 4), None, None]
    assert credit.weights[[0, 2, 3]].eq(1).all()


def test_a_row_that_is_masked_out_gets_no_credit(scored):
    mask = COMPLETION_MASK.clone()
    mask[0] = 0
    credit = counterfactual_credit(None, Tokenizer(), PROMPTS, PROMPT_MASK, COMPLETIONS, mask, logprobs=True)
    assert credit.weights[0].eq(1).all()
    assert credit.logprobs[0].eq(0).all()
    assert credit.weights[1, 0] == 4.0


def test_credit_metrics_describe_the_scored_rows(scored):
    metrics = counterfactual_credit(None, Tokenizer(), *ARRAYS).metrics(COMPLETION_MASK)
    assert metrics["credit/scored_fraction"] == 0.75
    assert metrics["credit/spans_mean"] == 2
    assert metrics["credit/drop_mean"] == -1.5
    assert metrics["credit/drop_min"] == -2.0
    assert metrics["credit/distractor_fraction"] == 0
    assert metrics["credit/weight_mean"] == (8 + 7 + 2 + 8) / 16


@pytest.mark.parametrize(
    ("arrays", "advantages", "message"),
    [
        ((PROMPTS, PROMPT_MASK[:2], COMPLETIONS, COMPLETION_MASK), None, "prompt_ids and prompt_mask must be one"),
        ((PROMPTS[:2], PROMPT_MASK[:2], *ARRAYS[2:]), None, "completion_ids has 4 rows, prompt_ids has 2"),
        ((PROMPTS, PROMPT_MASK * 0, COMPLETIONS, COMPLETION_MASK), None, "prompt_mask row 0: is all zero"),
        ((PROMPTS, PROMPT_MASK.flip(1), *ARRAYS[2:]), None, "prompt_mask row 0: must be padded on the left"),
        ((*ARRAYS[:3], COMPLETION_MASK.flip(1)), None, "completion_mask row 1: must be padded on the right"),
        (ARRAYS, torch.zeros(3), r"advantages must be \(B,\) or \(B, T\)"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused_by_name_and_row(scored, arrays, advantages, message):
    with pytest.raises(ValueError, match=message):
        counterfactual_weights(None, Tokenizer(), *arrays, advantages=advantages)


def test_a_tokenizer_without_pad_or_end_of_text_needs_a_placeholder(scored):
    class Bare:
        pad_token_id = eos_token_id = None

    with pytest.raises(ValueError, match="placeholder_id: the tokenizer has neither"):
        counterfactual_weights(None, Bare(), *ARRAYS)
    counterfactual_weights(None, Bare(), *ARRAYS, config=CounterfactualConfig(placeholder_id=9))
    assert scored[0][4] == 9


@pytest.mark.parametrize("mode", ["counterfactual", "random"])
def test_credit_finds_the_answer_by_the_configs_own_format_and_fallback(monkeypatch, mode):
    tokenizer = get_tokenizer("byte-level, single digits")
    monkeypatch.setattr(
        module, "score_counterfactuals",
        lambda model, prompts, completions, spans, answers, **_: CounterfactualScores(
            torch.zeros(len(prompts)), [torch.zeros(len(row)) for row in spans],
            [torch.zeros(len(row)) for row in spans], None, ScoringWork(1, 1, 1, 1),
        ),
    )  # fmt: skip
    ids = torch.tensor([encode(tokenizer, "So #### 5. RESULT=8 or 9")])
    ones, prompt = torch.ones_like(ids), torch.tensor([[3]])
    arrays = (None, tokenizer, prompt, torch.ones_like(prompt), ids, ones)
    for options, expected in (
        ({}, "5"),
        ({"answer_format": r"RESULT=(\d)"}, "8"),
        ({"answer_format": r"TOTAL=(\d)", "answer_fallback": "last_number"}, "9"),
    ):
        credit = counterfactual_credit(*arrays, config=CounterfactualConfig(mode=mode, **options))
        (answer,) = credit.answers
        assert tokenizer.decode(ids[0, answer.start : answer.end]).strip() == expected
        assert credit.weights[0, answer.start] == 1.5
    with pytest.raises(TypeError, match="row 0: answer_format must return None or"):
        counterfactual_credit(*arrays, config=CounterfactualConfig(mode=mode, answer_format=lambda text: 1))
