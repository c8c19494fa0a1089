"""Define the clipped policy-gradient loss of a token and its derivative, once for every form of the loss.

`token_terms` is the formula; `policy_terms` adds the two levels of the ratio; `token_terms_triton` mirrors the formula.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_math import minimum

LOG_RATIO_MAX = 40.0  # nats: the cut-off of log-ratios, so that no ratio overflows float32; the gradient beyond is 0


class PolicyOptions(NamedTuple):
    """Hyper-parameters of the loss of a token, under TRL's names."""

    loss_type: str = "dapo"  # a loss of `token_terms`
    level: str = "token"  # or "sequence", or "sequence_token"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    delta: float = float("inf")  # upper clip
    beta: float = 0.0
    use_bias_correction_kl: bool = False  # multiplies the KL term by the ratio
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    correction: str = ""  # one of `CORRECTIONS`
    sampling_clip_min: float = 0.0
    sampling_clip_max: float = float("inf")
    off_policy_mask_threshold: float = float("inf")  # nats

    @property
    def joins_tokens(self) -> bool:
        """Whether a token's loss depends on the log-probs of its whole sequence."""
        by_sequence = self.correction.startswith(("sequence", "geometric"))
        return self.level != "token" or by_sequence or self.off_policy_mask_threshold != float("inf")

    def numbers(self) -> list[float]:
        """Return the fields `NUMBERS`."""
        return [float(getattr(self, name)) for name in NUMBERS]

    @classmethod
    def of(cls, loss_type: str, level: str, correction: str, numbers: Sequence[float]) -> "PolicyOptions":
        """Undo `numbers`."""
        named: dict[str, Any] = dict(zip(NUMBERS, numbers, strict=True))
        return cls(loss_type, level, correction=correction, **named)


CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")
NUMBERS = tuple(name for name in PolicyOptions._fields if name not in ("loss_type", "level", "correction"))
"""Fields of `PolicyOptions` that are numbers, in the order in which an operator takes them."""


class Tokens(NamedTuple):
    """Inputs of the loss of each token besides its log-prob: tensors of one shape and dtype."""

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None  # of the engine that sampled; nan where it gave none
    scale: Tensor  # factor of the token's loss in the sum that is the loss; 0 if the token does not count

    def moved(self) -> Tensor:
        """Find the tokens whose weighted advantage is not 0."""
        moved = self.advantages != 0
        return moved if self.weights is None else moved & (self.weights != 0)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """Apply `change` to every tensor."""
        return Tokens._make(None if tensor is None else change(tensor) for tensor in self)


class TokenTerms(NamedTuple):
    """Results of `token_terms`, all in the shape of the log-probs."""

    loss: Tensor  # of the token, before aggregation
    direct: Tensor  # its derivative by the log-prob at a fixed ratio
    via_ratio: Tensor  # and by the log-ratio, which the sequence level spreads over the sequence
    ratio: Tensor
    kl: Tensor  # k3 estimate, perhaps bias-corrected, nats
    clip: Tensor  # -1 / +1 where the lower / upper clip bites


def token_terms(logprobs: Tensor, log_ratio: Tensor, tokens: Tokens, options: PolicyOptions) -> TokenTerms:
    """Compute the loss of each token and its two partial derivatives.

    Losses (c = exp(log_ratio), A = advantage, w = weight):
    `dapo`   -w * min(min(c, delta) * A, clamp(c, 1 - epsilon, 1 + epsilon_high) * A)   PPO / DAPO (eq. 8 of CF)
    `cispo`  -w * stop_gradient(min(c, epsilon_high)) * A * logprob
    `sapo`   -w * 4 / tau * sigmoid(tau * (c - 1)) * A, tau by the sign of A
    and then, unweighted, `+ beta * k3` with k3 = exp(ref - logprob) - (ref - logprob) - 1.

    log_ratio is `logprobs - old_logprobs` or its mean over a sequence, nats; all tensors have one shape.
    """
    inside = log_ratio <= LOG_RATIO_MAX
    ratio = log_ratio.clamp(max=LOG_RATIO_MAX).exp()
    weighted = tokens.advantages if tokens.weights is None else tokens.weights * tokens.advantages
    zero = torch.zeros_like(ratio)
    direct, via_ratio = zero, zero
    clipped_low = clipped_high = torch.zeros_like(inside)

    if options.loss_type == "dapo":
        low, high = 1 - options.epsilon, 1 + options.epsilon_high
        capped = ratio.clamp(max=options.delta)
        first, second = capped * weighted, ratio.clamp(low, high) * weighted
        loss = -torch.minimum(first, second)
        passes = torch.where(first <= second, ratio <= options.delta, (ratio >= low) & (ratio <= high))
        via_ratio = torch.where(passes & inside, -ratio * weighted, zero)
        clipped_low, clipped_high = (capped < low) & (weighted < 0), (capped > high) & (weighted > 0)
    elif options.loss_type == "cispo":
        direct = -ratio.clamp(max=options.epsilon_high) * weighted
        loss = direct * logprobs
        clipped_high = (ratio > options.epsilon_high) & (weighted > 0)
    elif options.loss_type == "sapo":
        # float32 constants in every dtype, as in TRL and in the kernel
        tau = torch.where(tokens.advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
        tau = tau.to(ratio.dtype)
        gate = torch.sigmoid(tau * (ratio - 1))
        loss = -4 / tau * gate * weighted
        via_ratio = -4 * gate * (1 - gate) * weighted * ratio  # 0 at the cut-off, where the gate is 1
    else:
        raise ValueError(f"loss_type={options.loss_type!r} has no loss of a token")

    kl = zero
    if tokens.ref_logprobs is not None:
        gap = (tokens.ref_logprobs - logprobs).clamp(max=LOG_RATIO_MAX)
        kl = gap.exp() - gap - 1
        kl_slope = torch.where(gap < LOG_RATIO_MAX, 1 - gap.exp(), zero)
        if options.use_bias_correction_kl:
            kl, kl_slope = kl * ratio, kl_slope * ratio
            via_ratio = via_ratio + options.beta * torch.where(inside, kl, zero)
        if options.beta != 0:
            loss = loss + options.beta * kl
            direct = direct + options.beta * kl_slope

    return TokenTerms(loss, direct, via_ratio, ratio, kl, clipped_high.to(ratio.dtype) - clipped_low.to(ratio.dtype))


def off_policy_factor(logprobs: Tensor, tokens: Tokens, options: PolicyOptions) -> Tensor | None:
    """Compute the factor (B, T), without gradient, of each token's policy term for rollouts of another policy.

    With r = exp(old - sampling), where old is the current log-prob on-policy and a token without a sampling log-prob
    has r = 1, and R the product, G the geometric mean of r over a sequence: `token_truncate` clamps r to
    [sampling_clip_min, sampling_clip_max], `token_mask` takes r inside that band and 0 outside (with both bounds:
    IcePop, 2510.18855); `sequence_truncate` and `sequence_mask` do so with R (TRL), and `geometric_mask` takes 1 where
    G is inside and 0 outside (verl). A sequence of negative advantage is dropped whose mean of sampling - current
    exceeds `off_policy_mask_threshold` (DeepSeek-V3.2). None without `sampling_logprobs`.
    """
    if tokens.sampling_logprobs is None:
        return None
    counted, low, high = tokens.scale > 0, options.sampling_clip_min, options.sampling_clip_max
    known = counted & ~tokens.sampling_logprobs.isnan()

    def mean(gap: Tensor) -> Tensor:
        return gap.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)

    factor = torch.ones_like(logprobs)
    if options.correction:
        old = logprobs if tokens.old_logprobs is None else tokens.old_logprobs
        gap = torch.where(known, old - tokens.sampling_logprobs, 0)
        gap = {"s": lambda: gap.sum(1, keepdim=True), "g": lambda: mean(gap)}.get(options.correction[0], lambda: gap)()
        ratio = gap.clamp(max=LOG_RATIO_MAX).exp()
        inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
        kept = inside if options.correction.startswith("geometric") else ratio * inside
        factor = factor * (ratio.clamp(low, high) if options.correction.endswith("truncate") else kept)
    if options.off_policy_mask_threshold != float("inf"):
        drift = mean(torch.where(known, tokens.sampling_logprobs - logprobs, 0))
        factor = factor * ((tokens.advantages >= 0) | (drift <= options.off_policy_mask_threshold))
    return factor


def policy_terms(logprobs: Tensor, tokens: Tokens, options: PolicyOptions) -> tuple[TokenTerms, Tensor]:
    """Compute the terms (B, T) of a batch, and the derivative (B, T) of `sum(loss * scale)` by each log-prob.

    logprobs and the fields of `tokens` are (B, T), 0 where a token does not count. At the sequence level a token's
    log-ratio is the mean over the counted tokens of its sequence (GSPO). At the level "sequence_token" it has that
    value and its own log-prob's gradient (GSPO-token, arXiv 2507.18071, eq. 13).
    """
    counted = tokens.scale > 0
    log_ratio = logprobs - (logprobs if tokens.old_logprobs is None else tokens.old_logprobs)
    if options.level != "token":
        length = counted.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(1, keepdim=True) / length).expand_as(logprobs)
    factor = off_policy_factor(logprobs, tokens, options)
    if factor is not None:
        tokens = tokens._replace(weights=factor if tokens.weights is None else factor * tokens.weights)
    terms = token_terms(logprobs, log_ratio, tokens, options)
    direct, via_ratio = terms.direct * tokens.scale, terms.via_ratio * tokens.scale
    if options.level == "sequence":
        via_ratio = via_ratio.sum(1, keepdim=True) / length * counted
    return terms, direct + via_ratio


def refuse_second_derivative() -> None:
    """Raise `RuntimeError` in a backward with `create_graph=True`, for which a stored gradient would be a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("the policy loss has first derivatives only: run its backward without create_graph=True")


@triton.jit
def token_terms_triton(
    logprob, old_logprob, advantage, weight, ref_logprob,
    low, high, delta, beta, sapo_pos, sapo_neg, log_ratio_max,
    LOSS_TYPE: tl.constexpr, HAS_REF: tl.constexpr, CORRECT_KL: tl.constexpr,
):  # fmt: skip
    """Return `token_terms` of one token at its level: (loss, d loss / d logprob, ratio, kl, clip), fp32 scalars."""
    # low and high bound the ratio: 1 - epsilon, 1 + epsilon_high, or epsilon_high itself for cispo.
    log_ratio = logprob - old_logprob
    inside = log_ratio <= log_ratio_max
    ratio = tl.exp(minimum(log_ratio, log_ratio_max))
    weighted = weight * advantage
    clip = 0.0
    if LOSS_TYPE == "dapo":
        capped = minimum(ratio, delta)
        first = capped * weighted
        second = minimum(tl.maximum(ratio, low), high) * weighted
        loss = -minimum(first, second)
        unclipped = (ratio >= low) & (ratio <= high)
        passes = ((first <= second) & (ratio <= delta)) | ((first > second) & unclipped)
        slope = tl.where(passes & inside, -ratio * weighted, 0.0)
        clip = tl.where((capped > high) & (weighted > 0), 1.0, 0.0)
        clip = tl.where((capped < low) & (weighted < 0), -1.0, clip)
    elif LOSS_TYPE == "cispo":
        slope = -minimum(ratio, high) * weighted
        loss = slope * logprob
        clip = tl.where((ratio > high) & (weighted > 0), 1.0, 0.0)
    else:
        tau = tl.where(advantage > 0, sapo_pos, sapo_neg)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        loss = -4.0 / tau * gate * weighted
        slope = -4.0 * gate * (1.0 - gate) * weighted * ratio
    kl = 0.0
    if HAS_REF:
        gap = minimum(ref_logprob - logprob, log_ratio_max)
        excess = tl.exp(gap)
        kl = excess - gap - 1.0
        kl_slope = tl.where(gap < log_ratio_max, 1.0 - excess, 0.0)
        if CORRECT_KL:
            kl = kl * ratio
            kl_slope = kl_slope * ratio + tl.where(inside, kl, 0.0)
        loss += beta * kl
        slope += beta * kl_slope
    return loss, slope, ratio, kl, clip
