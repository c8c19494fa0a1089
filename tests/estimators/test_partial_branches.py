"""Branches of a few rows equal dense forwards in which only those rows are computed anew."""

import copy

import pytest
import torch

from cfa_kernels.estimators.partial_branches import answer_knockout, short_branches
from cfa_kernels.estimators.resampling import resampled_fills
from cfa_kernels.ops.segment_table import SegmentTable
from cfa_kernels.ops.tree_attention import tree_attention
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.masked import score_counterfactuals
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, batch, batch_of, make_model, tokens

pytestmark = pytest.mark.slow


def scores_of(partial, model, *data, first=None, outcome="logprob", **options):
    """Scores in the order of `data`; rows are computed anew, or blind, from the tokens `first` on."""
    given = batch_of(model, *data, **options)
    start = None if first is None else [first[b] for b in given.numbers]
    place = {"fed_from" if partial is short_branches else "blind_from": start}
    return partial(InProcess(model), given, outcome=outcome, **place).in_callers_order(given)


def dense_logprobs(model, ids, position, seen):
    """(L, V) by one float64 forward with the mask `seen` (L, L), within the model's window."""
    exact = copy.deepcopy(model).double().eval()
    exact.set_attn_implementation("eager")
    window = getattr(model.config, "sliding_window", None)
    if window is not None:
        seen = seen & (position[:, None] - position[None] < window)
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    given = {"input_ids": ids[None], "position_ids": position[None], "attention_mask": bias[None, None]}
    with torch.no_grad():
        logits = exact(**{name: tensor.to(exact.device) for name, tensor in given.items()}).logits
    return logits[0].double().cpu().log_softmax(-1)


def blind(model, prompt, completion, answer, span, first):
    """(A, V): rows from token `first` on do not see `span`, but each itself."""
    ids = torch.cat([prompt, completion])
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    if span is not None:
        shift = len(prompt)
        seen[shift + first :, shift + span.start : shift + span.end] = False
        seen |= torch.eye(len(ids), dtype=torch.bool)
    start = len(prompt) + answer.start - 1
    return dense_logprobs(model, ids, torch.arange(len(ids)), seen)[start : start + answer.end - answer.start]


def anew(model, prompt, completion, answer, span, first):
    """(A, V): the completion as sampled, then `span` masked and rows from `first` on, which see it in its place."""
    if span is None:
        return blind(model, prompt, completion, answer, None, first)
    whole = torch.cat([prompt, completion[: answer.end]])
    start, stop, length = len(prompt) + span.start, len(prompt) + span.end, len(whole)
    own = max(len(prompt) + first, stop)
    position = torch.cat([torch.arange(length), torch.arange(start, stop), torch.arange(own, length)])
    ids = torch.cat([whole, torch.full((stop - start,), PLACEHOLDER), whole[own:]])
    seen = position[:, None] >= position[None]
    seen[:length, length:] = False
    seen[length:, start:stop] = False
    seen[length:, own:length] = False
    logprobs = dense_logprobs(model, ids, position, seen)
    rows = [length + t - start if t < stop else len(ids) - length + t for t in range(length)]
    first_target = len(prompt) + answer.start
    return torch.stack([logprobs[rows[t - 1]] for t in range(first_target, length)])


def outcome_of(name, logprobs, base, targets):
    """What is read off the rows that predict the answer."""
    if name == "last":
        return -(base[0].exp() * (base[0] - logprobs[0])).sum().item()
    return logprobs.gather(1, targets[:, None]).sum().item()


@pytest.mark.parametrize("outcome", ["logprob", "last"])
@pytest.mark.parametrize("marker", [0, 2])
@pytest.mark.parametrize(
    ("name", "judge", "budget"),
    [
        ("Qwen3", blind, None),
        ("Qwen3", blind, 1),
        ("Llama", blind, 80),
        ("Qwen3", anew, None),
        ("Olmo2", anew, 80),
        ("Mistral", anew, 1),
    ],
)
def test_branches_of_a_few_rows_equal_dense_forwards(name, judge, budget, marker, outcome):
    model = make_model(name)
    prompts, completions, spans, answers = batch()
    first = [max(0, answer.start - marker) if answer else 0 for answer in answers]
    options = {"first": first if marker else None, "token_budget": budget, "outcome": outcome}
    partial = short_branches if judge is anew else answer_knockout
    found = scores_of(partial, model, prompts, completions, spans, answers, **options)
    assert (found.work.forwards == 1) == (budget is None)
    for b, answer in enumerate(answers):
        assert len(found.masked[b]) == len(found.drop[b]) == len(spans[b])
        if answer is None:
            assert torch.isnan(found.base[b])
            assert torch.isnan(found.drop[b]).all()
            continue
        targets, start = completions[b][slice(*answer)], min(first[b], answer.start - 1)
        as_sampled = judge(model, prompts[b], completions[b], answer, None, start)
        base = outcome_of(outcome, as_sampled, as_sampled, targets)
        assert abs(found.base[b].item() - base) < 2e-5
        for k, span in enumerate(spans[b]):
            expected = base
            if span.start < answer.start:
                rows = judge(model, prompts[b], completions[b], answer, span, start)
                expected = outcome_of(outcome, rows, as_sampled, targets)
            assert abs(found.masked[b][k].item() - expected) < 3e-5
            assert abs(found.drop[b][k].item() - (expected - base)) < 4e-5


@pytest.mark.parametrize("outcome", ["logprob", "mean_logprob", "last", "mean"])
@pytest.mark.parametrize("filled", [False, True])
def test_branches_that_compute_all_rows_behind_the_span_are_exact(outcome, filled):
    model = make_model("Mistral")
    data = batch()
    rows = batch_of(model, *data)
    fills = None
    if filled:
        drawn = rows.to_callers_order(resampled_fills(InProcess(model), rows, seed=0)[0])
        fills = [list(map(torch.from_numpy, row)) for row in drawn]
    options = {"placeholder_id": PLACEHOLDER, "outcome": outcome, "fills": fills}
    exact = score_counterfactuals(model, *data, **options)
    found = scores_of(short_branches, model, *data, first=[0] * len(data[0]), **options)
    for ours, theirs in zip(found.drop, exact.drop, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-5, equal_nan=True)
    torch.testing.assert_close(found.base, exact.base, rtol=0, atol=2e-5, equal_nan=True)


def test_a_short_branch_costs_the_span_and_the_last_rows():
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    model, spans, answer = make_model("Qwen3"), [Span(2, 6), Span(8, 10)], Span(16, 19)
    work = scores_of(short_branches, model, [prompt], [completion], [spans], [answer], first=[14]).work
    assert (work.tokens_fed, work.head_rows, work.forwards) == (9 + 18 + (4 + 4) + (2 + 4), 3 * 3, 1)
    assert work.tokens_unshared == 3 * 27


@pytest.mark.parametrize("hidden", [False, True])
def test_equal_rows_of_branches_are_computed_once(hidden):
    (prompt,), (completion, other) = tokens(9), tokens(20, 20, seed=5)
    other[:13] = completion[:13]
    model, span, answer = make_model("Qwen3"), Span(2, 6), Span(16, 19)
    columns = [prompt] * 3, [completion, completion, other], [[span, span], [span], [span]], [answer] * 3
    if hidden:
        found = scores_of(answer_knockout, model, *columns)
        assert found.work.tokens_fed == 9 + 18 + 5 + 3 + 3
    else:
        found = scores_of(short_branches, model, *columns)
        assert found.work.tokens_fed == 9 + 18 + 5 + 4 + 3 + 3
    assert found.drop[0][0] == found.drop[0][1] == found.drop[1] != found.drop[2]


def test_a_knockout_costs_the_completion_once_and_the_blind_rows_of_each_span():
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    model, spans, answer = make_model("Qwen3"), [Span(2, 6), Span(8, 12)], Span(16, 19)
    alone = scores_of(answer_knockout, model, [prompt], [completion], [spans], [answer]).work
    assert (alone.tokens_fed, alone.head_rows, alone.forwards) == (9 + 18 + 2 * 3, 3 * 3, 1)
    marked = scores_of(answer_knockout, model, [prompt], [completion], [spans], [answer], first=[14]).work
    assert marked.tokens_fed == 9 + 18 + 2 * 4
    assert marked.tokens_unshared == 3 * 27


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tree_attention_leaves_out_the_rows_that_a_context_does_not_hold(backend, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(13, heads, 16, generator=generator) for heads in (4, 2, 2))
    table = SegmentTable(
        *(torch.tensor(x, dtype=torch.int32).numpy() for x in ([0, 10], [10, 3], [0, 0], [0, 6], [0, 1, 2, 7, 8, 9]))
    )
    out = tree_attention(*(x.to(device) for x in (q, k, v)), table, backend=backend)[10:].cpu()
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
            "Lfm2ForCausalLM has layers that carry a state",
        ),
    ],
)
def test_models_that_see_past_the_mask_are_refused_by_name(name, changes, message):
    model = make_model(name, **changes)
    with pytest.raises(NotImplementedError, match=message):
        scores_of(answer_knockout, model, *batch())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("blind_from", "message"),
    [
        ([16] + [0] * 6, r"blind_from row 0: 16 is outside \[0, 15\]"),
        ([0, -1] + [0] * 5, r"blind_from row 1: -1 is outside \[0, 30\]"),
    ],
)
def test_blind_rows_start_before_the_answer(blind_from, message):
    with pytest.raises(ValueError, match=message):
        scores_of(answer_knockout, make_model("Qwen3"), *batch(), first=blind_from)


def test_every_completion_has_a_first_blind_row():
    model = make_model("Qwen3")
    with pytest.raises(ValueError, match="blind_from has 2 rows, the batch has 7"):
        answer_knockout(InProcess(model), batch_of(model, *batch()), blind_from=[0, 0])


def test_what_hides_a_unit_needs_no_placeholder_and_what_replaces_it_does():
    model = make_model("Qwen3")
    with_one, without = (
        scores_of(answer_knockout, model, *batch(), placeholder_id=token) for token in (PLACEHOLDER, None)
    )
    assert all(map(torch.equal, without.drop[:3], with_one.drop[:3]))
    with pytest.raises(ValueError, match="placeholder_id: must be given where units are masked"):
        scores_of(short_branches, model, *batch(), placeholder_id=None)


def test_a_nan_names_the_callers_row():
    model = make_model("Qwen3")
    prompts, completions, spans, answers = batch()
    scores_of(answer_knockout, model, prompts, completions, spans, answers)
    completions[4][20] = 210
    with torch.no_grad():
        model.get_input_embeddings().weight[210] = float("nan")
    with pytest.raises(FloatingPointError, match="completions row 4: the model gave a nan"):
        scores_of(answer_knockout, model, prompts, completions, spans, answers)
