"""Outcomes of masked scoring: each equals its definition by full forwards and full logits in float64."""

import functools
import math

import pytest
import torch

from cfa_kernels.model.head import Head
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.outcomes import Divergences
from cfa_kernels.scoring.packed import packed_forward
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, batch, make_model, score_columns, score_forward, tokens

pytestmark = pytest.mark.slow

OUTCOMES = ["logprob", "mean_logprob", "last", "mean"]
HEADS = {
    "Qwen3": {},
    "Gemma2": {"final_logit_softcapping": 4.0},
    "Cohere": {"logit_scale": 0.7},
    "Phi": {},  # a head with bias
}


def every_token(answer, length):
    """A span for each token of a completion but those of its answer."""
    return [Span(t, t + 1) for t in range(length) if answer is None or not answer.start <= t < answer.end]


@functools.cache
def planted(name):
    """A float64 model, two completions of a prompt, and the logits of full forwards, one per span, before it none."""
    model = make_model(name, **HEADS[name]).cpu().double()
    (prompt,), completions = tokens(7), tokens(12, 9, seed=1)
    answers = [Span(8, 11), Span(7, 9)]
    spans = [every_token(answer, len(ids)) for answer, ids in zip(answers, completions, strict=True)]
    logits = []
    for completion, answer, masks in zip(completions, answers, spans, strict=True):
        rows = torch.cat([prompt, completion]).repeat(1 + len(masks), 1)
        for row, span in zip(rows[1:], masks, strict=True):
            row[len(prompt) + span.start : len(prompt) + span.end] = PLACEHOLDER
        first = len(prompt) + answer.start - 1
        with torch.no_grad():
            whole = model(input_ids=rows.to(model.device)).logits.cpu()
        logits.append(whole[:, first : first + answer.end - answer.start])
    return model, ([prompt] * 2, completions, spans, answers), logits


def importances(logits, targets, outcome):
    """(K,) from logits (1 + K, A, V) at the rows that predict the answer's targets (A,)."""
    if outcome in ("last", "mean"):
        z = logits[:, 0] if outcome == "last" else logits.mean(1)
        return kl(z[:1], z[1:])
    chosen = logits.log_softmax(-1)[:, range(len(targets)), targets]
    score = chosen.sum(1) if outcome == "logprob" else chosen.mean(1)
    return score[0] - score[1:]


def kl(p, q):
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("name", HEADS)
def test_the_importance_of_every_token_equals_its_definition_by_full_forwards(name, outcome):
    model, data, logits = planted(name)
    scores = score_columns(model, *data, mask=PLACEHOLDER, outcome=outcome)
    for b, answer in enumerate(data[3]):
        expected = importances(logits[b], data[1][b][answer.start : answer.end], outcome)
        assert expected.abs().max() > 0.01  # far above the tolerance
        # Gemma 2's own attention takes its softmax in float32, whatever the model's dtype.
        tolerance = {"rtol": 1e-5, "atol": 5e-6} if name == "Gemma2" else {"rtol": 1e-7, "atol": 1e-9}
        torch.testing.assert_close(scores.drop[b].cpu(), expected, **tolerance)
    if outcome in ("last", "mean"):
        assert scores.base.tolist() == [0, 0]
        assert all((drop >= 0).all() for drop in scores.drop)


@pytest.mark.parametrize(
    ("outcome", "budget"),
    [("logprob", 1), ("mean", 1), ("mean_logprob", 40), ("last", 40), ("logprob", 100), ("mean", 100)],
)
def test_a_completion_over_the_token_budget_is_split_to_the_same_result_and_fed_once(qwen3, outcome, budget):
    (prompt,), (completion,), answer = tokens(9), tokens(20, seed=5), Span(16, 19)
    spans = every_token(answer, len(completion))
    arguments = (qwen3, [prompt], [completion], [spans], [answer])
    whole = score_columns(*arguments, mask=PLACEHOLDER, outcome=outcome)
    split = score_columns(*arguments, mask=PLACEHOLDER, outcome=outcome, token_budget=budget)
    fed = 18 if outcome != "last" else 16  # rows of the completion that any prediction of the answer needs
    assert whole.work.tokens_fed == split.work.tokens_fed == 9 + fed + sum(fed - t for t in range(16))
    assert whole.work.forwards == 1
    assert split.work.forwards == 17 if budget == 1 else 17 > split.work.forwards > 1
    torch.testing.assert_close(split.drop[0], whole.drop[0], rtol=0, atol=3e-5)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_forward_that_kept_its_states_scores_every_outcome_from_branches_alone(qwen3, outcome):
    prompts, completions, spans, answers = batch()
    forward = packed_forward(qwen3, Rows(prompts, completions), keep_states=True)
    found = score_forward(forward, spans, answers, mask=PLACEHOLDER, outcome=outcome)
    expected = score_columns(qwen3, prompts, completions, spans, answers, mask=PLACEHOLDER, outcome=outcome)
    assert found.work.tokens_fed < expected.work.tokens_fed - sum(map(len, completions[:3]))
    torch.testing.assert_close(found.base, expected.base, rtol=0, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(found.drop, expected.drop, rtol=0, atol=3e-5, equal_nan=True)


def head_and_rows(rows, width=24, vocabulary=151_936, **options):
    generator = torch.Generator().manual_seed(rows)
    weight, states = (torch.randn(n, width, generator=generator) for n in (vocabulary, rows))
    # Branches from far off to hardly different from the first rows.
    scale = torch.logspace(-3, 0, rows)[:, None]
    states = states[:1] + scale * states
    bias = torch.randn(vocabulary, generator=generator)
    return Head(weight, bias, **options), states


def exact_logits(head, states):
    z = head.logit_scale * (states.double() @ head.weight.double().t() + head.bias.double())
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


@pytest.mark.parametrize(
    ("softcap", "count", "dtype"),
    [(None, 1, torch.float32), (None, 3, torch.bfloat16), (8.0, 1, torch.bfloat16), (8.0, 3, torch.float32)],
)
def test_a_divergence_over_a_large_vocabulary_is_within_2e_5_nats_of_float64(softcap, count, dtype, device):
    head, states = head_and_rows(4 * count, softcap=softcap, logit_scale=0.7)
    head = Head(head.weight.to(device, dtype), head.bias.to(device, dtype), softcap, 0.7)
    states = states.to(device, dtype)
    found = Divergences(head).read(states, torch.full((4,), count).numpy(), [0] * 4)
    z = exact_logits(head, states).view(4, count, -1).mean(1)
    expected = kl(z[:1], z)
    assert expected.max() > 0.05
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 8.0])
def test_a_token_that_a_bias_forbids_adds_nothing_to_a_divergence(softcap):
    head, states = head_and_rows(2, vocabulary=300)
    bias = head.bias.clone()
    bias[:10] = -math.inf
    cap = softcap and 1e4  # a cap that leaves -inf far below every other logit
    found = Divergences(Head(head.weight, bias, cap)).read(states, torch.ones(2).long().numpy(), [0, 0])
    z = exact_logits(Head(head.weight, head.bias), states)[:, 10:]
    torch.testing.assert_close(found[1].double(), kl(z[0], z[1]), rtol=1e-4, atol=2e-5)
