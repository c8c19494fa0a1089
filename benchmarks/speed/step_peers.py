"""Collect the ways to do credit and update of one training step, one function each, all with one signature.

A contender takes a `Replay` (a policy and recorded rollouts) and a `Stopwatch`, does its work inside
`with stopwatch.part(...)`, "credit" and "update", leaves its gradient on the policy's parameters and returns the loss
and the token weights it used. The loss is dapo's, on-policy, at temperature 1; no optimizer steps. Spans
and answers are given: finding them costs every contender the same.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.speed.peers import using_attention
from benchmarks.speed.replay import EPSILON, EPSILON_HIGH, Replay, StepPeer, Stopwatch, Weights, trl_update
from benchmarks.speed.step_reference import NEAREST_SPANS, judged_job
from benchmarks.speed.varlen import PER_SEQUENCE
from cfa_kernels import Batch, Rows
from cfa_kernels.credit.weights import Range, WeightInputs
from cfa_kernels.loss.policy import linear_policy_loss
from cfa_kernels.loss.ragged import LossBatch
from cfa_kernels.model.check.verify import check_supported
from cfa_kernels.model.head import Head
from cfa_kernels.model.limits import default_token_budget
from cfa_kernels.model.parts import backbone
from cfa_kernels.scoring.packed import packed_forward
from cfa_kernels.tree.packs import groups_within

# TRL


def trl_plain(replay: Replay, stopwatch: Stopwatch, *, whole: bool = False) -> tuple[Tensor, None]:
    """TRL's dapo step: padded, with its chunked head and its metrics; without activation checkpointing, as all here."""
    trainer = replay.trl(micro_batch=len(replay.job.completions) if whole else None)
    with stopwatch.part("update"):
        return trl_update(replay, trainer), None


def trl_credited(replay: Replay, stopwatch: Stopwatch, *, log_entropy: bool = True) -> tuple[Tensor, Weights]:
    """`PackedGRPOTrainer(credit=CounterfactualConfig())` as a TRL user has it: it finds spans and answers."""
    trainer = replay.trl(credited=True, log_entropy=log_entropy)
    trainer.stopwatch = stopwatch
    with stopwatch.part("update"):
        loss = trl_update(replay, trainer)
    return loss, trainer.weights


def _prepare_credited(replay: Replay, *, log_entropy: bool = True) -> None:
    """Make the trainer, which checks its model, and check it for scoring."""
    with replay.trl(credited=True, log_entropy=log_entropy).accelerator.autocast():
        check_supported(replay.causal)


# Without padding, without sharing


def _sequences(replay: Replay) -> list[tuple[Tensor, int]]:
    """Each row as it is fed, without its last token, and the length of its prompt."""
    pairs = zip(replay.job.prompts, replay.job.completions, strict=True)
    return [(torch.cat([prompt, completion[:-1]]), len(prompt)) for prompt, completion in pairs]


def row_states(causal: PreTrainedModel, ids: Tensor, positions: Tensor, **attention: Any) -> Tensor:
    """Hidden states (N, H) of one packed row."""
    return backbone(causal)(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, **attention
    ).last_hidden_state[0]


def varlen_states(causal: PreTrainedModel, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Hidden states (L, H) of each row, fed end to end without padding, each with its own positions."""
    lengths = [*map(len, rows)]
    ids, positions = (torch.cat([*x]).to(causal.device) for x in (rows, map(torch.arange, lengths)))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(causal.device, torch.int32)
    with using_attention(causal, PER_SEQUENCE):
        return row_states(causal, ids, positions, cu_seq_lens_q=ends, longest=max(lengths)).split(lengths)


def _fused_loss(replay: Replay, head: Head, hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """The loss of some completions from the hidden states (R, H) that predict their tokens, one after the other.

    The fused head and loss that ours runs, so that only what is fed differs.
    """
    completions = [replay.job.completions[b] for b in rows]
    lengths = torch.tensor([len(completion) for completion in completions], device=replay.device)
    targets = torch.cat(completions)[None]
    return linear_policy_loss(
        hidden[None], head.weight, targets, None, replay.advantages(rows).repeat_interleave(lengths)[None],
        torch.ones_like(targets, dtype=torch.bool), bias=head.bias, softcap=head.softcap,
        logit_scale=head.logit_scale, epsilon=EPSILON, epsilon_high=EPSILON_HIGH,
        num_items_in_batch=replay.rollouts.tokens,
    )[0]  # fmt: skip


def varlen(replay: Replay, stopwatch: Stopwatch) -> tuple[Tensor, None]:
    """Padding-free, every completion with its own prompt: sequences end to end, positions that start again."""
    causal, head, total = replay.causal, check_supported(replay.causal), torch.zeros((), device=replay.device)
    with stopwatch.part("update"):
        pairs = _sequences(replay)
        for rows in groups_within([len(ids) for ids, _ in pairs], default_token_budget(causal, training=True)):
            states = varlen_states(causal, [pairs[b][0] for b in rows])
            predicting = [one[pairs[b][1] - 1 :] for one, b in zip(states, rows, strict=True)]
            loss = _fused_loss(replay, head, torch.cat(predicting), rows)
            loss.backward()
            total += loss.detach()
    return total, None


# Ours


def micro_batches(replay: Replay) -> list[list[int]]:
    """Cut the rows with an advantage into micro-batches of whole groups, on a GPU as the training program does."""
    active, job, size = set(replay.rollouts.active), replay.job, replay.rollouts.group
    groups = [[b for b in range(i, i + size) if b in active] for i in range(0, len(job.prompts), size)]
    groups = [group for group in groups if group]
    if replay.device.type != "cuda":
        return [[b for group in groups for b in group]]
    sizes = [len(job.prompts[group[0]]) + sum(len(job.completions[b]) for b in group) for group in groups]
    parts = groups_within(sizes, default_token_budget(replay.causal, training=True))
    return [[b for i in part for b in groups[i]] for part in parts]


def ours(
    replay: Replay, stopwatch: Stopwatch, *, credited: bool, kind: str = "counterfactual"
) -> tuple[Tensor, Weights | None]:
    """One tree for each micro-batch: the scores read off its forward, then the loss, fused with the head."""
    job, total = replay.job, torch.zeros((), device=replay.device)
    weights = [torch.ones(len(completion)) for completion in job.completions] if credited else None
    options = {
        "epsilon": EPSILON, "epsilon_high": EPSILON_HIGH, "num_items_in_batch": replay.rollouts.tokens,
        "num_sequences_in_batch": len(job.prompts),
    }  # fmt: skip
    for index in micro_batches(replay):
        with stopwatch.part("forward"):
            part = judged_job(kind, job.part(index))
            rows, advantages = Rows(part.prompts, part.completions, index), replay.rollouts.advantages[index]
            forward = packed_forward(replay.causal, rows, token_budget=1 << 30, keep_states=credited)
            plain = functools.cache(functools.partial(LossBatch.of, Batch(rows, advantages=advantages), **options))
            forward.meanwhile = plain
        own, scored = None, Batch(rows, units=part.spans, answers=part.answers)
        if weights is not None:
            with stopwatch.part("credit"):
                scored.unread = []  # as in the training program: the host reads nothing before the backward
                drops = forward.score(scored, mask=job.placeholder_id).drop
                columns = zip(drops, part.spans, part.answers, map(len, part.completions), strict=True)
                own = Range()([WeightInputs(*column) for column in columns], inverted=False)
        with stopwatch.part("loss"):
            loss = forward.policy_loss(plain().credited(weights=own)).loss
        with stopwatch.part("backward"):
            loss.backward()
            total += loss.detach()
        if weights is not None and own is not None:
            for check in scored.unread or ():
                check()
            for b, line in zip(index, torch.cat(own).cpu().split([*map(len, own)]), strict=True):
                weights[b] = line
    return total, weights


TRL, WHOLE = "TRL", "TRL, all rows at a time"
PLAIN, EXACT = "ours", "ours counterfactual, one pass"
NEAREST = f"{EXACT}, {NEAREST_SPANS} nearest spans"
VARLEN = "varlen without sharing"
CREDITED = "PackedGRPOTrainer, credit"
NO_ENTROPY = "PackedGRPOTrainer, credit, log_entropy=False"


def _credited(rows: str, **options: bool) -> StepPeer:
    run, prepare = functools.partial(trl_credited, **options), functools.partial(_prepare_credited, **options)
    return StepPeer(run, "found", 2, rows, own_policy=True, prepare=prepare)


STEP_PEERS: dict[str, StepPeer] = {
    TRL: StepPeer(trl_plain, "plain", 3, "positions"),
    WHOLE: StepPeer(functools.partial(trl_plain, whole=True), "plain", 3, "positions"),
    VARLEN: StepPeer(varlen, "plain", 2, "active"),
    CREDITED: _credited("tokens"),
    NO_ENTROPY: _credited("active", log_entropy=False),
    PLAIN: StepPeer(functools.partial(ours, credited=False), "plain", 2, "active"),
    EXACT: StepPeer(functools.partial(ours, credited=True), "counterfactual", 2, "active"),
    NEAREST: StepPeer(functools.partial(ours, credited=True, kind="nearest"), "nearest", 2, "active"),
}
