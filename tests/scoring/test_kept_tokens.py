"""Log-probs and losses of packed rows over the ids that the sampler kept equal those of plain forwards."""

import random

import pytest
import torch

from cfa_kernels import (
    KeptTokens,
    Rows,
    packed_logprobs,
    packed_policy_loss,
    policy_loss,
)
from tests.support.models import assert_same_gradients, batch, gradients, make_model

PROMPTS, COMPLETIONS, *_ = batch()
ROWS = Rows(PROMPTS, COMPLETIONS)
LENGTHS = torch.tensor(ROWS.lengths)
SIGNS = torch.tensor([1.0, -0.5, 0.0, 0.7, -1.2, 0.3, 0.0])


def kept_lists(vocabulary: int, *, some_without: bool) -> list[list[list[int]]]:
    draw = random.Random(3)
    return [
        [
            []
            if some_without and t % 5 == 2
            else [*draw.sample(range(vocabulary), draw.choice([1, 3, 20])), int(token)]
            for t, token in enumerate(row)
        ]
        for row in COMPLETIONS
    ]


def dense(model, lists, temperature):
    """Log-probs and entropies by one plain forward a row, whose other logits are -inf."""
    logprobs, entropies = [], []
    for prompt, completion, kept in zip(PROMPTS, COMPLETIONS, lists, strict=True):
        ids = torch.cat([prompt, completion])[None].to(model.device)
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        closed = torch.ones_like(logits, dtype=torch.bool)
        for t, own in enumerate(kept):
            closed[t, own or slice(None)] = False
        logp = logits.masked_fill(closed, -torch.inf).log_softmax(-1).masked_fill(closed, -1e4)
        logprobs.append(logp.gather(-1, completion[:, None].to(model.device))[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return logprobs, entropies


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize(("name", "some_without"), [("Qwen3", True), ("Gemma2", False)])  # the second with a softcap
def test_log_probs_losses_and_gradients_are_those_over_the_kept_ids(name, some_without):
    model = make_model(name)
    lists = kept_lists(model.config.vocab_size, some_without=some_without)
    kept = [KeptTokens.of(row) for row in lists]
    theirs = dense(model, lists, 0.7)
    ours = packed_logprobs(model, ROWS, temperature=0.7, return_entropy=True, kept_tokens=kept)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)
    plain = packed_logprobs(model, ROWS, temperature=0.7)
    assert max((a - b).abs().max() for a, b in zip(ours[0], plain, strict=True)) > 1
    assert_same_gradients(*(gradients(model, sum(row.sum() for row in part[0])) for part in (ours, theirs)))

    options = {"epsilon": 0.3, "weights": [torch.linspace(0, 2, n) for n in LENGTHS]}
    old = [row.detach().cpu() + 0.1 for row in theirs[0]]
    packed = packed_policy_loss(
        model, ROWS, old_logprobs=old, advantages=SIGNS, temperature=0.7, kept_tokens=kept, **options
    )
    mask = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
    expected, metrics = policy_loss(
        padded(dense(model, lists, 0.7)[0]), padded(old).to(model.device), SIGNS.to(model.device),
        mask.to(model.device), **options | {"weights": padded(options["weights"]).to(model.device)},
    )  # fmt: skip
    torch.testing.assert_close(packed.loss, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(packed.metrics["ratio_mean"], metrics["ratio_mean"], rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(model, packed.loss), gradients(model, expected))


def with_an_id(kept: KeptTokens, value: int) -> KeptTokens:
    return kept._replace(ids=torch.cat([kept.ids[:2], torch.tensor([value]), kept.ids[3:]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept[:3], "kept_tokens has 3 rows, prompts has 7; they must agree"),
        (lambda kept: [*kept[:4], kept[4].take(slice(0, 2)), *kept[5:]], "kept_tokens row 4: must hold offsets"),
        (lambda kept: [*kept[:6], [[1]]], "kept_tokens row 6 must be of class KeptTokens, got list"),
        (
            lambda kept: [kept[0], with_an_id(kept[1], 999), *kept[2:]],
            r"kept_tokens row 1, token \d: ids must be in the vocabulary \[0, \d+\), got 999",
        ),
        (
            lambda kept: [*kept[:3], KeptTokens.of([[(int(t) + 1) % 9] for t in COMPLETIONS[3]]), *kept[4:]],
            r"kept_tokens row 3, token 0: must hold the sampled token \d+, got 1 other ids",
        ),
    ],
    ids=["rows", "tokens", "class", "vocabulary", "missing"],
)  # fmt: skip
def test_kept_ids_that_do_not_fit_are_refused_by_row_token_and_value(change, message):
    model = make_model("Qwen3", num_hidden_layers=1)
    kept = [KeptTokens.of(row) for row in kept_lists(model.config.vocab_size, some_without=False)]
    with pytest.raises((ValueError, TypeError), match=message):
        packed_policy_loss(model, ROWS, advantages=torch.ones(7), kept_tokens=change(kept))
    with pytest.raises((ValueError, TypeError), match=message):
        packed_logprobs(model, ROWS, kept_tokens=change(kept))
