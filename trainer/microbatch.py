"""One packed forward and backward's worth of a batch of rollouts, and what must hold of it.

Where it stands: between rollouts and the loss. Micro-batches are whole groups, so that a prompt is fed once; rows that
cannot change the update are left out here.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cfa_kernels import Credit, ScoringWork, Span, counterfactual_credit
from cfa_kernels.hf.liger import runs_fused
from cfa_kernels.hf.limits import default_token_budget
from cfa_kernels.hf.memory import halves
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.losses.ragged import LossBatch
from cfa_kernels.scoring.access import TrainingForward
from cfa_kernels.scoring.training_forward import PackedForward, packed_forward, packed_logprobs
from trainer.config import TrainConfig
from trainer.rollouts.sampling import Rollouts


@dataclass
class MicroBatch:
    """Some completions of a batch, unpadded and on the host: b rows, of t tokens each."""

    rows: Tensor  # (b,) their numbers in the batch
    prompts: list[Tensor]  # b tensors (p,)
    completions: list[Tensor]  # b tensors (t,)
    mask: list[Tensor]  # b tensors (t,): what the loss counts
    advantages: Tensor  # (b,)
    sampled_logprobs: list[Tensor]  # b tensors (t,)
    rewards: Tensor | None = None  # (b,), for credit that compares completions
    weights: list[Tensor] | None = None  # b tensors (t,); None until credit is assigned
    token_advantages: list[Tensor] | None = None  # b tensors (t,), where credit is signed
    old_logprobs: list[Tensor] | None = None
    ref_logprobs: list[Tensor] | None = None
    share: float = 1.0  # of the loss of the micro-batch that it is a part of, where the denominator is its own

    @property
    def tokens(self) -> float:
        """Tokens that the loss counts."""
        return float(sum(row.sum() for row in self.mask))

    def loss_batch(self, config: TrainConfig) -> LossBatch:
        """What the loss needs beside the model."""
        return LossBatch.of(
            self.completions, self.old_logprobs, self.token_advantages or self.advantages, weights=self.weights,
            mask=self.mask, ref_logprobs=self.ref_logprobs, compute_entropy=True,
            importance_sampling_level=config.importance_sampling_level,
        )  # fmt: skip

    def forward(self, policy: nn.Module, config: TrainConfig, *, keep_states: bool = False) -> PackedForward:
        """Hidden states of every completion, with gradient; prompts are fed once."""
        return packed_forward(
            causal_lm(policy), self.prompts, self.completions, token_budget=config.token_budget, keep_states=keep_states
        )

    def halved(self, group_size: int) -> list["MicroBatch"]:
        """The same rows in two micro-batches of whole groups, of `group_size` completions each; none for one group."""
        groups = (self.rows // group_size).tolist()
        parts = halves(range(len(groups)), groups.__getitem__) if len(set(groups)) > 1 else []

        def of(part: Sequence[int]) -> "MicroBatch":
            chosen: dict[str, Any] = {
                name: column[list(part)] if isinstance(column, Tensor) else [column[i] for i in part]
                for name, column in vars(self).items()
                if isinstance(column, (Tensor, list))
            }
            made = dataclasses.replace(self, **chosen)
            made.share = self.share * made.tokens / max(self.tokens, 1.0)
            return made

        return [of(part) for part in parts]

    def logprobs(self, model: nn.Module, config: TrainConfig) -> list[Tensor]:
        """b tensors (t,) fp32, nats, without gradient."""
        with torch.no_grad():
            found = packed_logprobs(
                model, self.prompts, self.completions, temperature=config.temperature, token_budget=config.token_budget
            )
        assert isinstance(found, list)
        return found

    def sampling_gap(self, logprobs: Sequence[Tensor]) -> list[Tensor]:
        """b tensors (t,): how far `logprobs` are from those sampled with, nats; 0 where nothing counts."""
        return [
            torch.where(mask.bool(), (sampled - found).abs(), 0.0)
            for sampled, found, mask in zip(self.sampled_logprobs, logprobs, self.mask, strict=True)
        ]

    def sampling_metrics(self, logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
        """How far generation's log-probs are from these, under TRL's names."""
        gap = torch.cat(self.sampling_gap(logprobs))[torch.cat(self.mask).bool()]
        return {
            "sampling/sampling_logp_difference/mean": gap.mean(),
            "sampling/sampling_logp_difference/max": gap.max(),
        }

    def open_choice(self) -> list[Tensor]:
        """b tensors (t,): how probably each counted token could have come out otherwise, and a little more.

        Logits that are off by x move a token's log-prob by some x (1 - p): near-certain tokens hide any error. The
        little keeps those of probability 1 from dividing rounding by nothing.
        """
        pairs = zip(self.sampled_logprobs, self.mask, strict=True)
        return [(1 - sampled.exp() + 1e-3) * mask for sampled, mask in pairs]

    def require_finite_logprobs(self, logprobs: Sequence[Tensor]) -> None:
        """Raise `FloatingPointError` naming the samples whose counted log-probs are not finite."""
        bad = [
            int(row)
            for row, found, mask in zip(self.rows, logprobs, self.mask, strict=True)
            if not found[mask.bool()].isfinite().all()
        ]
        if bad:
            raise FloatingPointError(f"samples {bad}: log-prob is not finite")

    def require_finite_gradient(self, norm: Tensor, model: nn.Module) -> None:
        """Raise `FloatingPointError` naming the samples and the first parameter with a gradient that is not."""
        if not norm.isfinite():
            names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            where = f" of {names[0]}" if names else ""
            raise FloatingPointError(f"samples {self.rows.tolist()}: gradient{where} is not finite")


def micro_batches(
    config: TrainConfig,
    rollouts: Rollouts,
    mask: Tensor,
    advantages: Tensor,
    policy: nn.Module,
    weights: Tensor | None = None,
    rewards: Tensor | None = None,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of whole groups, as many as fit `token_budget` tree rows, at least one.

    Rows the mask leaves out are dropped, and rows without advantage too, unless the KL term or `bnpo`'s
    denominator (its own micro-batch) needs them. `mask` is (B, T), `advantages` (B,), `weights` (B, T) and
    `rewards` (B,) if known.
    """
    if rollouts.logprobs is None:
        raise ValueError("rollouts: must have been sampled; these were decoded greedily")
    causal = causal_lm(policy)
    budget = config.token_budget or default_token_budget(causal, training=True, fused=runs_fused(causal))
    skip = config.beta == 0 and config.loss_type != "bnpo"
    rollouts, mask, advantages = rollouts_on_host(rollouts), mask.cpu(), advantages.cpu()
    weights = None if weights is None else weights.cpu()
    assert rollouts.logprobs is not None
    wanted = mask.any(1) & ((advantages != 0) | (not skip))
    lengths = rollouts.completion_mask.sum(1).tolist()
    prompt_lengths = rollouts.prompt_mask.sum(1).tolist()
    parts: list[list[int]] = []
    size = 0
    for start in range(0, len(wanted), config.num_generations):
        group = [b for b in range(start, start + config.num_generations) if wanted[b]]
        if not group:
            continue
        added = prompt_lengths[start] + sum(lengths[b] for b in group)
        if not parts or size + added > budget:
            parts.append([])
            size = 0
        parts[-1] += group
        size += added
    return [
        MicroBatch(
            rows=torch.tensor(part),
            prompts=[rollouts.prompt_ids[b, rollouts.prompt_ids.shape[1] - prompt_lengths[b] :] for b in part],
            completions=[rollouts.completion_ids[b, : lengths[b]] for b in part],
            mask=[mask[b, : lengths[b]] for b in part],
            advantages=advantages[part],
            sampled_logprobs=[rollouts.logprobs[b, : lengths[b]] for b in part],
            rewards=None if rewards is None else rewards[part],
            weights=None if weights is None else [weights[b, : lengths[b]] for b in part],
        )
        for part in parts
    ]


class Pass(NamedTuple):
    """What the forward, loss and backward of one micro-batch gave."""

    loss: Tensor  # ()
    norm: Tensor  # (), of the gradients summed so far
    metrics: dict[str, Tensor]  # ()
    logprobs: list[Tensor]  # b tensors (t,)


def fetched(passes: Sequence[Pass]) -> list[Pass]:
    """The same on the host: the one wait for the device in an optimizer step that is given its weights."""
    rows = [(one.loss, one.norm, *one.metrics.values(), *one.logprobs) for one in passes]
    there = iter(on_host([tensor for row in rows for tensor in row]))
    return [
        Pass(next(there), next(there), {name: next(there) for name in one.metrics}, [next(there) for _ in one.logprobs])
        for one in passes
    ]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Floating tensors, detached, by one copy from their device."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().reshape(-1).to(tensors[0].device) for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def rollouts_on_host(rollouts: Rollouts) -> Rollouts:
    """The same with every tensor on the host, where micro-batches are cut and trees laid out."""
    moved: dict[str, Any] = {name: value.cpu() for name, value in vars(rollouts).items() if isinstance(value, Tensor)}
    return dataclasses.replace(rollouts, **moved)


def assign_credit(
    micro: MicroBatch,
    policy: nn.Module,
    forward: PackedForward,
    rollouts: Rollouts,
    mask: Tensor,
    config: TrainConfig,
    **options: Any,
) -> Credit:
    """Credit of a micro-batch's completions; sets the weights, or the token advantages. `mask` is (B, T).

    Answers and probes are scored, and entropies read, from the micro-batch's own `forward`; other estimators run the
    policy themselves. Valid before the first optimizer step on a batch, while the policy is the one that sampled.
    `options` are those of `counterfactual_credit`; all tensors are on the host.
    """
    part, entropies, settings = micro.rows, None, config.counterfactual()
    if settings.reads_entropies:
        with torch.no_grad():
            _, found = forward.logprobs(config.temperature, return_entropy=True)
        assert isinstance(found, list)
        entropies = torch.zeros(len(part), rollouts.completion_ids.shape[1])
        for row, line in zip(on_host(found), entropies, strict=True):
            line[: len(row)] = row
    credit = counterfactual_credit(
        TrainingForward(forward),
        prompt_ids=rollouts.prompt_ids[part],
        prompt_mask=rollouts.prompt_mask[part],
        completion_ids=rollouts.completion_ids[part],
        completion_mask=mask[part],
        advantages=micro.advantages,
        config=settings,
        groups=part // config.num_generations,
        rewards=micro.rewards,
        entropies=entropies,
        **options,
    )
    lengths = [len(ids) for ids in micro.completions]
    micro.weights = [row[:length] for row, length in zip(credit.weights, lengths, strict=True)]
    if credit.advantages is not None:
        micro.token_advantages = [row[:length] for row, length in zip(credit.advantages, lengths, strict=True)]
    return credit


def credit_of_batch(shape: torch.Size, parts: Sequence[tuple[MicroBatch, Credit]]) -> Credit:
    """Credit of all (B, T) completions from that of the micro-batches; the others weigh 1 and were not scored."""
    batch = shape[0]
    weights, base = torch.ones(shape), torch.full((batch,), float("nan"))
    answers: list[Span | None] = [None] * batch
    spans: list[list[Span]] = [[] for _ in range(batch)]
    drop = [torch.zeros(0)] * batch
    signed = any(credit.advantages is not None for _, credit in parts)
    advantages, added = (torch.zeros(shape), torch.zeros(shape)) if signed else (None, None)
    noise = drop[:]
    for micro, credit in parts:
        weights[micro.rows] = credit.weights
        base[micro.rows] = credit.base
        if advantages is not None and credit.advantages is not None:
            advantages[micro.rows] = credit.advantages
        if added is not None and credit.added is not None:
            added[micro.rows] = credit.added
        for i, b in enumerate(micro.rows.tolist()):
            answers[b], spans[b], drop[b] = credit.answers[i], credit.spans[i], credit.drop[i]
            noise[b] = torch.zeros(len(drop[b])) if credit.noise is None else credit.noise[i]
    done = [credit.work for _, credit in parts if credit.work is not None]
    work = sum(done, ScoringWork()) if done else None
    return Credit(weights, answers, spans, drop, base, work, advantages, added, noise)


# Nats by which rounding moves logits between sampling token by token and one forward over whole rows, on average;
# several times what was seen on models of 4 to 24 layers (float32 6e-6, bfloat16 0.07).
_ROUNDING = {torch.float64: 0.02, torch.float32: 0.02, torch.float16: 0.05}
_ROUNDING_OF_OTHERS = 0.3  # bfloat16 and what is coarser


def sampling_gap_limit(config: TrainConfig, model: nn.Module) -> float:
    """`max_sampling_gap`, or what the coarsest floating type among the weights explains at this temperature, nats."""
    if config.max_sampling_gap is not None:
        return config.max_sampling_gap
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(_ROUNDING.get(dtype, _ROUNDING_OF_OTHERS) for dtype in dtypes) / min(config.temperature, 1.0)


def checked_sampling_gap(parts: Sequence[MicroBatch], policy: nn.Module, config: TrainConfig) -> float:
    """How far `old_logprobs` are from those a batch was sampled with, nats, held to `sampling_gap_limit`.

    To be asked before the first optimizer step on the batch, while the policy is the one that sampled. The gap is the
    mean of |sampled - old| over counted tokens, each weighed by `open_choice`.

    Raises:
        FloatingPointError: rounding cannot explain the gap; the message names the samples and how large it is.
    """
    limit = sampling_gap_limit(config, policy)
    by_row: dict[int, float] = {}
    gap_sum = choice_sum = 0.0
    for micro in parts:
        if micro.old_logprobs is None:
            continue
        gaps = micro.sampling_gap(micro.old_logprobs)
        for row, gap, choice in zip(micro.rows.tolist(), gaps, micro.open_choice(), strict=True):
            gap_sum += float(gap.sum())
            choice_sum += float(choice.sum())
            by_row[row] = float(gap.sum() / choice.sum())
    mean = gap_sum / choice_sum
    if mean <= limit:
        return mean
    worst = max(by_row, key=lambda row: by_row[row] if by_row[row] == by_row[row] else math.inf)
    raise FloatingPointError(
        f"samples {sorted(row for row, gap in by_row.items() if not gap <= limit)}: their log-probs in the update are "
        f"not those they were sampled with, though no weight has changed: {mean:.3g} nats apart over the batch, "
        f"{by_row[worst]:.3g} in sample {worst}, and max_sampling_gap is {limit:.3g}. The model computes "
        "something else over whole rows than token by token, so the update would follow a wrong gradient"
    )
