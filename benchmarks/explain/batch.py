"""A batch as it is described: lengths, groups and spans, as random ids that the program's own planner lays out."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.workloads import SEED, gsm8k_rollouts
from cfa_kernels import ScoredBatch, Span
from cfa_kernels.hf.limits import kept_per_row
from cfa_kernels.hf.model import causal_lm
from trainer.microbatch import MicroBatch, micro_batches
from trainer.rollouts import Rollouts

ROWS = 65_536
"""Most rows of a forward: beyond it one gains nothing (`cfa_kernels.hf.limits`)."""

ANSWER, SPAN = 3, 12
"""Tokens of an answer, which ends its completion, and of a span."""


@dataclass(frozen=True)
class Described:
    """Completions in groups of one prompt each, with the spans that credit asks about.

    Attributes:
        prompts, completions: B tensors of ids, groups side by side.
        spans: B lists.
        answers: B spans.
        group: completions of a prompt.
        mixed: groups with an advantage come first, so many of them.
        positions: tokens that the longest completion of the batch is decoded for.
        words: what this is, in words.
    """

    prompts: list[Tensor]
    completions: list[Tensor]
    spans: list[list[Span]]
    answers: list[Span]
    group: int
    mixed: int
    positions: int
    words: str

    def micro_batches(self, policy: nn.Module, memory: float, most: int | None = None) -> list[MicroBatch]:
        """Cut what has an advantage as the trainer does: `most` rows, by default what half of the free memory holds."""
        budget = most or training_rows(policy, memory)
        b, width = len(self.prompts), max(map(len, self.prompts))
        longest = max(map(len, self.completions))
        prompts, completions = torch.zeros(b, width, dtype=torch.long), torch.zeros(b, longest, dtype=torch.long)
        lengths = torch.tensor([len(row) for row in self.completions])
        prompt_lengths = torch.tensor([len(row) for row in self.prompts])
        for i, (prompt, completion) in enumerate(zip(self.prompts, self.completions, strict=True)):
            prompts[i, width - len(prompt) :], completions[i, : len(completion)] = prompt, completion
        mask = (torch.arange(longest) < lengths[:, None]).long()
        prompt_mask = (torch.arange(width) >= width - prompt_lengths[:, None]).long()
        rollouts = Rollouts(
            prompts, prompt_mask, completions, mask, torch.zeros(b, dtype=torch.bool), [""] * b, torch.zeros(b, longest)
        )
        advantages = torch.ones(b) * (torch.arange(b) < self.mixed * self.group)
        config: Any = SimpleNamespace(token_budget=budget, num_generations=self.group, beta=0.0, loss_type="dapo")
        return micro_batches(config, rollouts, mask, advantages, policy)

    def scored(self, micro: MicroBatch, policy: nn.Module) -> ScoredBatch:
        """The spans and answers of a micro-batch's completions."""
        rows = micro.rows.tolist()
        return ScoredBatch.of(
            causal_lm(policy), micro.prompts, micro.completions, [self.spans[b] for b in rows],
            [self.answers[b] for b in rows], placeholder_id=0, token_budget=ROWS,
        )  # fmt: skip


def training_rows(policy: nn.Module, memory: float) -> int:
    """Estimate rows of a forward with gradients: what half of the memory holds that the weights leave."""
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    holds = int((memory - weights) / 2 / kept_per_row(causal_lm(policy), fused=True))
    return min(max(holds, 1024), ROWS)


def described(
    problems: int, group: int, *, prompt: int, completion: int, spans: int, mixed: float, longest: int, vocabulary: int
) -> Described:
    """Random ids of equal lengths; spans of 12 tokens at even distances from the first token to the answer's marker.

    Raises:
        ValueError: spans that do not fit, a share outside [0, 1], a longest completion shorter than the mean.
    """
    if not 0 <= mixed <= 1:
        raise ValueError(f"mixed must be the share of groups with an advantage, in [0, 1], got {mixed}")
    if longest < completion:
        raise ValueError(f"longest must be at least the completion's {completion} tokens, got {longest}")
    inside = completion - ANSWER - 1  # before the marker
    if spans * SPAN > inside:
        raise ValueError(f"spans={spans} of {SPAN} tokens do not fit in {inside} tokens of reasoning")
    generator = torch.Generator().manual_seed(SEED)
    shape = (problems, prompt + group * completion)
    ids = torch.randint(1, vocabulary, shape, generator=generator)  # 0 is the placeholder
    starts = [k * inside // spans for k in range(spans)]
    rows = problems * group
    return Described(
        prompts=[row[:prompt] for row in ids for _ in range(group)],
        completions=[part for row in ids for part in row[prompt:].split(completion)],
        spans=[[Span(start, start + SPAN) for start in starts]] * rows,
        answers=[Span(completion - ANSWER, completion)] * rows,
        group=group,
        mixed=round(mixed * problems),
        positions=longest,
        words=f"{problems} problems x {group} completions, prompts of {prompt} tokens, completions of {completion} "
        f"(the longest of {longest}), {spans} spans each, {mixed:.0%} of groups mixed",
    )


def real(problems: int, *, mixed: float) -> Described:
    """Completions of `gsm8k_rollouts`, four a problem: real ones, or generated text where they are not at hand."""
    rollouts = gsm8k_rollouts(problems, mixed=mixed == 1)
    job = rollouts.job
    live = (rollouts.advantages.view(-1, rollouts.group) != 0).any(1)
    order = [int(g) * rollouts.group + i for g in torch.argsort(~live, stable=True) for i in range(rollouts.group)]

    def ordered(column: Sequence[Any]) -> list[Any]:
        return [column[b] for b in order]

    return Described(
        ordered(job.prompts), ordered(job.completions), ordered(job.spans), ordered(job.answers), rollouts.group,
        int(live.sum()), max(map(len, job.completions)),
        f"{problems} problems x {rollouts.group} completions ({job.source}), "
        f"{sum(map(len, job.spans)) / len(job.spans):.1f} spans each, {int(live.sum())} groups mixed",
    )  # fmt: skip
