"""One forward and backward's worth of a batch of rollouts.

Where it stands: between rollouts and the loss. Rows that cannot change the update are left out here, and padding
that no row of a micro-batch needs is cut off.
"""

from dataclasses import dataclass

from torch import Tensor, nn

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

    def sampling_gap(self, logprobs: Tensor) -> dict[str, Tensor]:
        """How far generation's log-probs are from these: they differ by rounding alone if all is well."""
        gap = (self.sampled_logprobs - logprobs).abs()[self.mask.bool()]
        return {
            "sampling/sampling_logp_difference/mean": gap.mean(),
            "sampling/sampling_logp_difference/max": gap.max(),
        }

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
