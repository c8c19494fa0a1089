"""Stop a run whose numbers cannot be trusted, before they change a weight or are saved."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cfa_kernels.loss.off_policy import open_choice, sampling_gaps
from cfa_kernels.model.check.verify import check_supported, check_trainable
from cfa_kernels.model.limits import refuse_length_dependent_rope
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.run_inside import run_inside

from .config import TrainConfig
from .rollouts.engine import Rollouts

# Nats by which rounding moves logits between sampling token by token and one forward over whole rows, on average;
# several times what was seen on models of 4 to 24 layers (float32 6e-6, bfloat16 0.07, adapters merged or not).
_ROUNDING = {torch.float64: 0.02, torch.float32: 0.02, torch.float16: 0.05}
_ROUNDING_OF_OTHERS = 0.3  # bfloat16 and what is coarser


def require_supported(policy: nn.Module, longest: int) -> None:
    """Raise `NotImplementedError` if the model gives wrong results for rows of up to `longest` tokens.

    Every run samples rows padded to a batch and trains on packed trees.
    """
    causal = causal_lm(policy)
    refuse_length_dependent_rope(causal, longest)

    def check() -> None:
        policy.train()
        try:
            check_trainable(causal)
        finally:
            policy.eval()
        check_supported(causal)  # here, so that no step waits for it

    run_inside(policy, check)


def require_finite(index: Sequence[int], logprobs: Sequence[Tensor], norm: Tensor, policy: nn.Module) -> None:
    """Raise `FloatingPointError` naming the samples of `index` whose log-probs, or whose gradients, are not finite."""
    if bad := [b for b, row in zip(index, logprobs, strict=True) if not row.isfinite().all()]:
        raise FloatingPointError(f"samples {bad}: log-prob is not finite")
    if not norm.isfinite():
        names = [n for n, p in policy.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        where = f" of {names[0]}" if names else ""
        raise FloatingPointError(f"samples {index}: gradient{where} is not finite")


def check_sampling_gap(
    logprobs: Mapping[int, Tensor], rollouts: Rollouts, policy: nn.Module, config: TrainConfig
) -> float:
    """Measure how far log-probs are from those a batch was sampled with, nats, and hold it to `sampling_gap_limit`.

    `logprobs` are tensors (t,) by the number of their completion. Call it before the first optimizer step on the batch,
    while `policy` is the one that sampled. The gap is the mean of the absolute difference over tokens that count, each
    weighed by how probably it could have come out otherwise; what normalising over the sampler's nucleus explains is no
    gap.

    Raises:
        FloatingPointError: rounding cannot explain the gap; the message names the samples and how large it is.
    """
    sampled, limit = rollouts.logprobs, sampling_gap_limit(config, policy)
    gaps = {b: float(sampling_gaps(sampled[b], row, rollouts.nucleus).sum()) for b, row in logprobs.items()}
    choices = {b: float(open_choice(sampled[b]).sum()) for b in logprobs}
    mean = sum(gaps.values()) / sum(choices.values())
    if mean <= limit:
        return mean
    by_row = {b: gap / choices[b] for b, gap in gaps.items()}
    worst = max(by_row, key=lambda b: math.inf if math.isnan(by_row[b]) else by_row[b])
    raise FloatingPointError(  # no later step could be trusted more
        f"samples {sorted(b for b, gap in by_row.items() if not gap <= limit)}: their log-probs in the update are "
        f"not those they were sampled with, though no weight has changed: {mean:.3g} nats apart over the batch, "
        f"{by_row[worst]:.3g} in sample {worst}, and max_sampling_gap is {limit:.3g}. The model computes "
        "something else over whole rows than token by token, so the update would follow a wrong gradient"
    )


def sampling_gap_limit(config: TrainConfig, model: nn.Module) -> float:
    """Give `max_sampling_gap`, or what the coarsest type of weights or products explains at this temperature, nats."""
    if config.max_sampling_gap is not None:
        return config.max_sampling_gap
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtypes.add(config.precision.products)
    return max(_ROUNDING.get(dtype, _ROUNDING_OF_OTHERS) for dtype in dtypes) / min(config.temperature, 1.0)
