"""One forward and backward's worth of a batch of rollouts, and what must hold of it.

Where it stands: between rollouts and the loss. Rows that cannot change the update are left out here, and padding
that no row of a micro-batch needs is cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cfa_kernels.hf import causal_lm, evaluation_mode
from trainer.config import TrainConfig
from trainer.model import completion_logprobs
from trainer.rollouts import Rollouts


@dataclass
class MicroBatch:
    """Some rows of a batch, cut to their own width: b rows, prompts of p tokens, completions of t."""

    rows: Tensor  # (b,) their numbers in the batch
    prompt_ids: Tensor  # (b, p)
    prompt_mask: Tensor
    completion_ids: Tensor  # (b, t)
    completion_mask: Tensor  # what the model attends to
    mask: Tensor  # what the loss counts
    advantages: Tensor  # (b,)
    weights: Tensor  # (b, t)
    sampled_logprobs: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @property
    def tokens(self) -> float:
        """Tokens that the loss counts."""
        return self.mask.sum().item()

    def logprobs(self, model: nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, (b, t)."""
        return completion_logprobs(
            model,
            self.prompt_ids,
            self.prompt_mask,
            self.completion_ids,
            self.completion_mask,
            temperature=temperature,
        )

    def sampling_gap(self, logprobs: Tensor) -> Tensor:
        """(b, t): how far `logprobs` are from those the tokens were sampled with, nats; 0 where nothing counts."""
        return (self.sampled_logprobs - logprobs).abs().masked_fill(self.mask == 0, 0.0)

    def sampling_metrics(self, logprobs: Tensor) -> dict[str, Tensor]:
        """How far generation's log-probs are from these, under TRL's names."""
        gap = self.sampling_gap(logprobs)[self.mask.bool()]
        return {
            "sampling/sampling_logp_difference/mean": gap.mean(),
            "sampling/sampling_logp_difference/max": gap.max(),
        }

    def open_choice(self) -> Tensor:
        """(b, t): the probability with which each counted token could have come out otherwise, and a little more.

        Logits that are off by x move a token's log-prob by some x (1 - p): near-certain tokens hide any error. The
        little keeps those of probability 1 from dividing rounding by nothing.
        """
        return (1 - self.sampled_logprobs.exp() + 1e-3) * self.mask

    def require_finite_logprobs(self, logprobs: Tensor) -> None:
        """Raise `FloatingPointError` naming the samples whose counted log-probs are not finite."""
        bad = (~logprobs.isfinite() & self.mask.bool()).any(1)
        if bad.any():
            raise FloatingPointError(f"samples {self.rows[bad].tolist()}: log-prob is not finite")

    def require_finite_gradient(self, norm: Tensor, model: nn.Module) -> None:
        """Raise `FloatingPointError` naming the samples and the first parameter with a gradient that is not."""
        if not norm.isfinite():
            names = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            where = f" of {names[0]}" if names else ""
            raise FloatingPointError(f"samples {self.rows.tolist()}: gradient{where} is not finite")


def micro_batches(
    config: TrainConfig, rollouts: Rollouts, mask: Tensor, advantages: Tensor, weights: Tensor
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of the rows that can change the update, `per_device_train_batch_size` each.

    Rows the mask leaves out are dropped, and rows without advantage too, unless the KL term or `bnpo`'s
    denominator (its own micro-batch) needs them. `mask` and `weights` are (B, T), `advantages` (B,).
    """
    if rollouts.logprobs is None:
        raise ValueError("rollouts: must have been sampled; these were decoded greedily")
    skip = config.beta == 0 and config.loss_type != "bnpo"
    rows = (mask.any(1) & ((advantages != 0) | (not skip))).nonzero().flatten()
    # Rows of like length side by side: less padding, and the loss does not depend on the split.
    rows = rows[rollouts.completion_mask[rows].sum(1).argsort(stable=True)]
    parts = []
    for part in rows.split(config.per_device_train_batch_size) if len(rows) else []:
        p = int(rollouts.prompt_mask[part].sum(1).max())
        t = int(rollouts.completion_mask[part].sum(1).max())
        parts.append(
            MicroBatch(
                part,
                rollouts.prompt_ids[part, -p:],
                rollouts.prompt_mask[part, -p:],
                rollouts.completion_ids[part, :t],
                rollouts.completion_mask[part, :t],
                mask[part, :t],
                advantages[part],
                weights[part, :t],
                rollouts.logprobs[part, :t],
            )
        )
    return parts


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
    gaps = [micro.sampling_gap(micro.old_logprobs) for micro in parts if micro.old_logprobs is not None]
    if (mean := _mean_gap(parts, gaps)) <= limit:
        return mean
    # Dropout is off in sampling and on in the update: where there is any, judge without it.
    with evaluation_mode(causal_lm(policy)):
        gaps = [micro.sampling_gap(micro.logprobs(policy, config.temperature)[0]) for micro in parts]
    if (mean := _mean_gap(parts, gaps)) <= limit:
        return mean
    rows = torch.cat([micro.rows for micro in parts])
    by_row = torch.cat([gap.sum(1) / micro.open_choice().sum(1) for micro, gap in zip(parts, gaps, strict=True)])
    worst = by_row.argmax()
    raise FloatingPointError(
        f"samples {sorted(rows[~(by_row <= limit)].tolist())}: their log-probs in the update are not those they were "
        f"sampled with, though no weight has changed: {mean:.3g} nats apart over the batch, "
        f"{by_row[worst]:.3g} in sample {rows[worst]}, and max_sampling_gap is {limit:.3g}. The model computes "
        "something else over whole rows than token by token, so the update would follow a wrong gradient"
    )


def _mean_gap(parts: Sequence[MicroBatch], gaps: Sequence[Tensor]) -> float:
    open_choice = sum(float(micro.open_choice().sum()) for micro in parts)
    return sum(float(gap.sum()) for gap in gaps) / open_choice
