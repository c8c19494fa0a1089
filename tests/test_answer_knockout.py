"""Answer rows that lose sight of a span equal a dense forward with that mask."""

import copy

import pytest
import torch

from cfa_kernels.answer_knockout import answer_knockout
from cfa_kernels.ops.segment_table import SegmentTable
from cfa_kernels.ops.tree_attention import tree_attention
from cfa_kernels.spans import Span
from tests.models import batch, make_model, tokens


def judged(model, prompt, completion, answer, span, blind_from):
    """Log P(answer) by one float64 forward whose rows from `blind_from` on do not see `span`, but each itself."""
    exact = copy.deepcopy(model).double().eval()
    exact.set_attn_implementation("eager")
    ids = torch.cat([prompt, completion])
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    if span is not None:
        first = len(prompt) + blind_from
        seen[first:, len(prompt) + span.start : len(prompt) + span.end] = False
        seen |= torch.eye(len(ids), dtype=torch.bool)
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    with torch.no_grad():
        logits = exact(input_ids=ids[None].to(exact.device), attention_mask=bias[None, None].to(exact.device)).logits
    logprobs = logits[0].double().cpu().log_softmax(-1)
    return sum(logprobs[len(prompt) + t - 1, completion[t]].item() for t in range(*answer))


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Olmo2"])
@pytest.mark.parametrize("budget", [None, 1, 80])
@pytest.mark.parametrize("marker", [0, 2])
def test_blind_answer_rows_equal_a_dense_masked_forward(name, budget, marker):
    model = make_model(name)
    prompts, completions, spans, answers = batch()
    blind_from = [max(0, answer.start - marker) if answer else 0 for answer in answers]
    found = answer_knockout(
        model, prompts, completions, spans, answers, blind_from=blind_from if marker else None, token_budget=budget
    )
    for b, answer in enumerate(answers):
        assert len(found.masked[b]) == len(found.drop[b]) == len(spans[b])
        if answer is None:
            assert torch.isnan(found.base[b])
            assert torch.isnan(found.drop[b]).all()
            continue
        first = min(blind_from[b], answer.start - 1)
        base = judged(model, prompts[b], completions[b], answer, None, first)
        assert abs(found.base[b].item() - base) < 2e-5
        for k, span in enumerate(spans[b]):
            expected = (
                judged(model, prompts[b], completions[b], answer, span, first) if span.start < answer.start else base
            )
            assert abs(found.masked[b][k].item() - expected) < 2e-5
            assert abs(found.drop[b][k].item() - (expected - base)) < 4e-5
    assert (found.work.forwards == 1) == (budget is None)


def test_a_knockout_costs_the_completion_once_and_the_blind_rows_of_each_span():
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    model, spans, answer = make_model("Qwen3"), [Span(2, 6), Span(8, 12)], Span(16, 19)
    alone = answer_knockout(model, [prompt], [completion], [spans], [answer]).work
    assert (alone.tokens_fed, alone.head_rows, alone.forwards) == (9 + 18 + 2 * 3, 3 * 3, 1)
    marked = answer_knockout(model, [prompt], [completion], [spans], [answer], blind_from=[14]).work
    assert marked.tokens_fed == 9 + 18 + 2 * 4
    assert marked.tokens_unshared == 3 * 27


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tree_attention_leaves_out_the_rows_that_a_context_does_not_hold(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(13, heads, 16, generator=generator) for heads in (4, 2, 2))
    table = SegmentTable(
        *(torch.tensor(x, dtype=torch.int32).numpy() for x in ([0, 10], [10, 3], [0, 0], [0, 6], [0, 1, 2, 7, 8, 9]))
    )
    out = tree_attention(q, k, v, table, backend=backend)[10:]
    seen = [0, 1, 2, 7, 8, 9, 10, 11, 12]
    visible = torch.ones(3, 9, dtype=torch.bool).tril(6)
    scores = torch.einsum("qhd,khd->hqk", q[10:].double(), k[seen].double().repeat_interleave(2, 1)) / 4
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v[seen].double().repeat_interleave(2, 1))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral", {}, "MistralForCausalLM has layers with a window or chunk"),
        ("Gemma2", {}, "Gemma2ForCausalLM has layers with a window or chunk"),
        (
            "Lfm2",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
            "Lfm2ForCausalLM carries a state past",
        ),
    ],
)
def test_models_that_see_past_the_mask_are_refused_by_name(name, changes, message):
    model = make_model(name, **changes)
    with pytest.raises(NotImplementedError, match=message):
        answer_knockout(model, *batch())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("blind_from", "message"),
    [
        ([0, 0], "blind_from has 2 rows, prompts has 7"),
        ([16] + [0] * 6, r"blind_from row 0: 16 is outside \[0, 15\]"),
        ([0, -1] + [0] * 5, r"blind_from row 1: -1 is outside \[0, 30\]"),
    ],
)
def test_blind_rows_start_before_the_answer(blind_from, message):
    with pytest.raises(ValueError, match=message):
        answer_knockout(make_model("Qwen3"), *batch(), blind_from=blind_from)


def test_a_nan_names_the_callers_row():
    model = make_model("Qwen3")
    prompts, completions, spans, answers = batch()
    answer_knockout(model, prompts, completions, spans, answers)
    completions[4][20] = 210
    with torch.no_grad():
        model.get_input_embeddings().weight[210] = float("nan")
    with pytest.raises(FloatingPointError, match="completions row 4: the model gave a nan"):
        answer_knockout(model, prompts, completions, spans, answers)
