"""Log-probs and losses normalised over the ids that a sampler kept, against float64 over the whole logits."""

import pytest
import torch

from cfa_kernels.loss.policy import linear_policy_loss, policy_loss
from cfa_kernels.ops.kept_tokens import KeptTokens, Support
from cfa_kernels.ops.linear_logprob import linear_logprob
from tests.support.budget import assert_within_budget
from tests.support.kept_tokens import KINDS, TRANSFORMS, B, H, T, V, dense, example, leaves_of
from tests.support.operator_calls import OperatorCalls

BACKENDS = ["torch", "triton"]


@pytest.mark.parametrize(("kind", "transform"), [("narrow", 1), ("wide", 0), ("mixed", 1)])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float64), ("torch", torch.bfloat16), ("triton", torch.float32), ("triton", torch.bfloat16)],
)
def test_log_probs_entropies_and_gradients_are_those_over_the_kept_ids(
    backend, dtype, kind, transform, device, poisoned_memory
):
    hidden, head, targets, options, lists = example(kind, dtype, device, **TRANSFORMS[transform])
    results = []
    for form, in_dtype in (("ours", dtype), ("plain", dtype), ("plain", torch.float64)):
        leaves, own = leaves_of(hidden, head, options, in_dtype)
        if form == "ours":
            kept = KeptTokens.of(lists)
            values = linear_logprob(*leaves[:2], targets, kept_tokens=kept, return_entropy=True, backend=backend, **own)
        else:
            values = dense(*leaves[:2], targets, lists, in_dtype, **own)
        weight = torch.linspace(-1, 2, B * T, device=device, dtype=values[0].dtype)
        (weight @ values[0] + weight.flip(0) @ values[1]).backward()
        results.append([*(value.detach() for value in values), *(leaf.grad for leaf in leaves)])
    for ours, low, exact in zip(*results, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)
        else:
            assert_within_budget(ours, low, exact, scale=1.0)


@pytest.mark.parametrize(
    ("backend", "kind", "level"),
    [
        *(("torch", kind, level) for kind in KINDS for level in ("token", "sequence")),
        ("triton", "narrow", "token"), ("triton", "mixed", "sequence"),
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_over_the_kept_ids(backend, kind, level, device, poisoned_memory):
    dtype = torch.float64 if backend == "torch" else torch.float32
    hidden, head, targets, options, lists = example(kind, dtype, device, **TRANSFORMS[1])
    mask = torch.arange(T) < torch.tensor([5, 2, 4])[:, None]
    advantages, old = torch.tensor([1.0, -0.7, 0.4]), torch.linspace(-3, -0.2, B * T).view(B, T)
    loss_options = {"importance_sampling_level": level, "epsilon": 3.0, "epsilon_high": 3.0, "entropy_coef": 0.1}
    old, advantages, mask = (tensor.to(device) for tensor in (old, advantages, mask))
    results = []
    for form in ("ours", "plain"):
        leaves, own = leaves_of(hidden, head, options, torch.float64 if form == "plain" else None)
        if form == "ours":
            rows = mask.cpu().flatten().nonzero().flatten()
            for chunk in (4, 64) if backend == "torch" else (4,):
                loss, _, logprobs = linear_policy_loss(
                    leaves[0][rows.to(device)], leaves[1], targets.view(B, T), old, advantages, mask, rows=rows,
                    kept_tokens=KeptTokens.of(lists), return_logprobs=True, chunk_size=chunk, backend=backend,
                    **own, **loss_options,
                )  # fmt: skip
                loss.backward()
            logprobs = logprobs[mask]
        else:
            logp, entropy = (v.view(B, T) for v in dense(*leaves[:2], targets, lists, torch.float64, **own))
            loss, _ = policy_loss(logp, old, advantages, mask, entropies=entropy, **loss_options)
            ((2 if backend == "torch" else 1) * loss).backward()
            logprobs = logp[mask]
        results.append([loss.detach(), logprobs.detach(), *(leaf.grad for leaf in leaves)])
    tolerance = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(*results, check_dtype=False, **tolerance)


def test_ids_in_one_list_with_offsets_are_those_of_lists_of_lists():
    lists, values = [[4, 9], [], [7]], [[-0.5, -1.0], [], [0.0]]
    flat = KeptTokens.of([4, 9, 7], [-0.5, -1.0, 0.0], offsets=[0, 2, 2, 3])
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(flat, KeptTokens.of(lists, values), strict=True))


@pytest.mark.parametrize(("kind", "columns"), [("narrow", 128), ("mixed", V)])
def test_logits_are_made_of_the_columns_that_are_kept_and_never_of_rows_by_vocabulary(kind, columns, monkeypatch):
    monkeypatch.setitem(linear_logprob.__globals__["STRIP_BYTES"], "cpu", 4 * V * 8)
    hidden, head, targets, _, lists = example(kind)
    assert Support.of(head, None, targets, KeptTokens.of(lists)).head.shape == (columns, H)
    leaves = [hidden.repeat(60, 1).requires_grad_(), head.requires_grad_()]
    with OperatorCalls() as operators:
        linear_logprob(*leaves, targets.repeat(60), kept_tokens=KeptTokens.of(lists * 60)).sum().backward()
    assert max(size for _, size in operators.calls) < 60 * B * T * V / 10


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (KeptTokens.of([[1, 2], [4]]), r"must hold offsets \(4,\) and ids \(K,\) for 3 tokens, got \(3,\)"),
        (KeptTokens.of([[1, 2], [4, 5], []]), r"kept_tokens\[1\]: must hold the sampled token 3, got 2 other ids"),
        (KeptTokens.of([[1, 9], [3], []]), r"kept_tokens\[0\]: ids must be in the vocabulary \[0, 9\), got 9"),
        (KeptTokens.of([[1], [3, -1], []]), r"kept_tokens\[1\]: ids must be in the vocabulary \[0, 9\), got -1"),
        (KeptTokens(torch.tensor([0, 2, 1, 3]), torch.tensor([1, 3, 3])), "offsets must rise from 0 to 3"),
        (KeptTokens(torch.tensor([0, 2, 3, 4]), torch.tensor([1, 3, 3])), "offsets must rise from 0 to 3"),
        ([[1, 2], [3], []], "kept_tokens must be of class KeptTokens, got list"),
        (KeptTokens(torch.tensor([0, 2, 3, 3]), torch.tensor([1.0, 2, 3])), "ids must be integers, got torch.float32"),
    ],
)
def test_kept_ids_that_do_not_fit_are_refused_by_token_and_value(kept, message):
    with pytest.raises((ValueError, TypeError), match=message):
        linear_logprob(torch.zeros(3, 4), torch.zeros(9, 4), torch.tensor([1, 3, 5]), kept_tokens=kept)


def test_an_id_with_a_log_prob_may_be_there_once_a_token():
    kept = KeptTokens.of([[3, 4], [4, 3, 4]], [[-1.0, -0.5], [-1.0, -0.5, -2.0]])
    with pytest.raises(ValueError, match=r"token 1: id 4 is there twice; with log-probs it may not be"):
        kept.checked("token {}".format, 2)
    assert len(kept._replace(logprobs=None).checked("token {}".format, 2).ids) == 5
    assert len(KeptTokens.of([[]], [[]]).checked("token {}".format, 1).ids) == 0
