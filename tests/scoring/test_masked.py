"""score_counterfactuals equals one full forward per span, on every architecture, and leaves the model as it was."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from cfa_kernels.batch import Batch
from cfa_kernels.model import head
from cfa_kernels.model.check import verify
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.access import LogprobService
from cfa_kernels.scoring.masked import ScoringWork, score_counterfactuals
from cfa_kernels.scoring.packed import packed_forward
from cfa_kernels.span import Span
from tests.support.models import (
    ARCHITECTURES,
    PLACEHOLDER,
    TREE,
    VOCAB,
    assert_equals_naive,
    batch,
    make_model,
    naive,
    naive_row,
    score_columns,
    score_forward,
    snapshot,
    tokens,
)


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, None) for name in ARCHITECTURES), ("Qwen3", 1), ("Qwen3", 60), ("Qwen3", 150)]
)
def test_scores_equal_one_full_forward_per_span_whatever_the_token_budget(name, budget):
    model, data = make_model(name), batch()
    scores = score_columns(model, *data, mask=PLACEHOLDER, token_budget=budget)
    assert budget is None or scores.work.forwards > 1
    assert_equals_naive(scores, model, *data)


def of_two_more(row, k):
    return [11] * (row.spans[k].end - row.spans[k].start + 2)


@pytest.mark.parametrize("mask", [PLACEHOLDER, "drop", of_two_more], ids=["id", "drop", "function"])
def test_a_branch_scores_as_the_sequence_that_its_mask_makes_fed_by_itself(mask):
    """In process, behind a training forward, and by a service."""
    model, (prompts, completions, spans, answers) = make_model("Qwen3").cpu().double(), batch()
    rows = Rows(prompts, completions)
    logprobs = functools.partial(naive_row, model)
    service = LogprobService(lambda *columns: [*map(logprobs, *columns)])
    every = [
        score_counterfactuals(model, rows, spans, answers, mask=mask),
        score_forward(packed_forward(model, rows, keep_states=True), spans, answers, mask=mask),
        service.score(Batch(rows, units=spans, answers=answers), mask=mask),
    ]
    for b, answer in enumerate(answers):
        base = torch.nan if answer is None else logprobs(prompts[b], completions[b])[slice(*answer)].sum()
        assert [scores.base[b].item() for scores in every] == pytest.approx([float(base)] * 3, abs=1e-5, nan_ok=True)
        for k, (start, end) in enumerate(spans[b] if answer else []):
            count = {"drop": 0, PLACEHOLDER: end - start}.get(mask, end - start + 2)
            ids = torch.full((count,), PLACEHOLDER if mask == PLACEHOLDER else 11)
            branch = torch.cat([completions[b][:start], ids, completions[b][end:]])
            moved = len(ids) - (end - start) if end <= answer.start else 0
            masked = logprobs(prompts[b], branch)[answer.start + moved : answer.end + moved].sum()
            for scores in every:
                assert abs(scores.masked[b][k].item() - masked.item()) < 1e-5
                assert abs(scores.drop[b][k].item() - (base - masked).item()) < 1e-5
                assert start < answer.start or scores.drop[b][k] == 0
    assert all(map(torch.equal, completions, batch()[1]))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_scores_equal_naive_forwards_on_random_ragged_batches(qwen3, data):
    shared = tokens(2, 5, seed=3)
    prompts, completions, spans, answers = [], [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 14))
        prompts.append(shared[data.draw(st.integers(0, 1))])
        completions.append(torch.tensor(data.draw(st.lists(st.integers(4, 6), min_size=length, max_size=length))))
        start = data.draw(st.integers(0, length - 1))
        answers.append(Span(start, data.draw(st.integers(start + 1, length))))
        edges = st.integers(0, max(start - 1, 0))
        drawn = data.draw(st.lists(st.tuples(edges, edges), max_size=3)) if start else []
        spans.append([Span(min(pair), max(pair) + 1) for pair in drawn])
    scores = score_columns(qwen3, prompts, completions, spans, answers, mask=PLACEHOLDER)
    assert_equals_naive(scores, qwen3, prompts, completions, spans, answers)


@pytest.mark.parametrize("name", TREE)
def test_the_last_layer_computes_its_output_and_mlp_for_answer_rows_alone(name):
    """And on those rows to the same numbers: the comparison with full forwards is above."""
    model, rows = make_model(name), []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[-2]))
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, out: rows.append(out.shape[-2]))
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    verify.check_supported(model)
    rows.clear()
    score_columns(model, [prompt], [completion], [[Span(4, 8)]], [Span(16, 19)], mask=PLACEHOLDER)
    fed = 9 + 18 + 14
    assert rows == [fed] * 4 + [6] * 2


def test_nothing_is_computed_for_rows_without_an_answer_nor_for_an_empty_batch(qwen3):
    scores = score_columns(qwen3, *([x] for x in (*tokens(5, 9), [Span(1, 2)], None)), mask=0)
    assert scores.work.forwards == scores.work.tokens_fed == 0
    assert torch.isnan(scores.base).all()
    scores = score_columns(qwen3, [], [], [], [], mask=0)
    assert scores.base.shape == (0,)
    assert scores.masked == scores.drop == []
    assert scores.work == ScoringWork()


class Fails(Exception):
    pass


@pytest.mark.parametrize(
    ("fails", "implementation", "dtype"),
    [
        ("never", "eager", torch.bfloat16),
        ("in the self-check", "sdpa", torch.float32),
        ("in scoring", "sdpa", torch.float32),
    ],
)
def test_the_model_is_as_before_afterwards_also_after_an_exception(implementation, fails, dtype, monkeypatch):
    model = make_model("Qwen3", attention_dropout=0.5).to(dtype)
    model.set_attn_implementation(implementation)
    model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"]))
    model.train()
    model.base_model.model.model.layers[1].eval()  # a mixed state, which train() and eval() alone would lose
    if fails == "in scoring":
        score_columns(model, *batch(), mask=PLACEHOLDER)
    before = snapshot(model)
    if fails == "never":
        score_columns(model, *batch(), mask=PLACEHOLDER)
    else:
        monkeypatch.setattr(head.Head, "logprobs", lambda *_: (_ for _ in ()).throw(Fails()))
        with pytest.raises((Fails, NotImplementedError)):
            score_columns(model, *batch(), mask=PLACEHOLDER)
    assert snapshot(model) == before


def changed(position, row, value):
    data = [list(column) for column in batch()]
    data[position][row] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(0, 2, torch.zeros(0, dtype=torch.int64)), "prompts row 2: is empty"),
        (changed(1, 1, torch.zeros(2)), "completions row 1: must be a 1-D int64 tensor .* torch.float32"),
        (changed(1, 1, [1, 2]), "completions row 1: must be a 1-D int64 tensor of token ids, got list"),
        (changed(0, 1, torch.tensor([5, VOCAB])), "prompts row 1: id 211 at position 1 is outside the vocabulary"),
        (changed(1, 0, torch.full((250,), 5)), "completions row 0: prompt of 7 and completion of 250 .* of 256"),
        (changed(2, 2, [Span(0, 1), Span(16, 18)]), r"spans row 2, span 1: \(16, 18\) is not a non-empty span inside"),
        (changed(2, 0, [Span(2, 16)]), r"spans row 0, span 0: \(2, 16\) overlaps the answer \(15, 18\)"),
        (changed(3, 2, Span(10, 18)), r"answers row 2: \(10, 18\) is not a non-empty span"),
        ([*batch()[:3], [None]], "answers has 1 rows, prompts has 7"),
    ],
)
def test_bad_rows_are_refused_by_argument_row_and_value(qwen3, data, message):
    with pytest.raises(ValueError, match=message):
        score_columns(qwen3, *data, mask=PLACEHOLDER)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mask": VOCAB}, r"mask must be an id in \[0, 211\), .* got 211"),
        ({"mask": None}, "mask: must be given .* got None"),
        ({"mask": [[]] * 7}, r"mask must be an id in \[0, 211\), 'drop' or a function, got"),
        ({"mask": lambda row, k: [VOCAB]}, "mask row 0, span 0: id 211 at position 0 is outside the vocabulary"),
        ({"mask": lambda row, k: [0.5]}, r"mask row 0, span 0: the function must give a row of ids, got \[0.5\]"),
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        ({"outcome": "median"}, "outcome must be one of logprob, .* got 'median'"),
    ],
)
def test_bad_options_are_refused_by_name(qwen3, option, message):
    with pytest.raises(ValueError, match=message):
        score_columns(qwen3, *batch(), **{"mask": PLACEHOLDER, **option})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", TREE)
def test_bf16_scores_on_a_gpu_stay_within_the_error_budget(name):
    """Against the float32 model, ours may be at most twice as far off as plain bf16 forwards are."""
    model = make_model(name, initializer_range=0.05)
    data = batch()
    exact = score_columns(model, *data, mask=PLACEHOLDER)
    model = model.bfloat16()
    ours = score_columns(model, *data, mask=PLACEHOLDER)
    prompts, completions, _, answers = data
    answered = [b for b, answer in enumerate(answers) if answer is not None]
    reference = torch.tensor([exact.base[b].item() for b in answered])
    plain = torch.tensor([naive(model, prompts[b], completions[b], answers[b]) for b in answered])
    got = torch.tensor([ours.base[b].item() for b in answered])
    allowed = 2 * ((plain - reference).abs().max() + 2**-8 * reference.abs().max())
    assert (got - reference).abs().max() <= allowed
