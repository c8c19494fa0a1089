"""Define the clipped policy-gradient loss of a token and its derivative, once for every form of the loss.

`token_terms` is the formula; `policy_terms` adds the two levels of the ratio; `token_terms_triton` mirrors the formula.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.triton_math import minimum
from .types import LOSS_TYPES

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
    correction: str = ""  # one of `CORRECTIONS`, or what `spread_correction` makes of it
    kl_estimator: str = "k3"  # one of `KL_ESTIMATORS`
    sampling_clip_min: float = 0.0
    sampling_clip_max: float = float("inf")
    off_policy_mask_threshold: float = float("inf")  # nats
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def joins_tokens(self) -> bool:
        """Whether a token's loss depends on the log-probs of its whole sequence."""
        by_sequence = self.correction.startswith(("sequence", "geometric")) or self.loss_type == "vespo"
        return self.level != "token" or by_sequence or self.off_policy_mask_threshold != float("inf")

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lower and the upper clip of what `loss_type` clips; a ratio is never below that of `cispo`."""
        at_rest = LOSS_TYPES[self.loss_type].rests_at
        return at_rest - self.epsilon, at_rest + self.epsilon_high

    def kinds(self) -> str:
        """Join the fields `KINDS`, as an operator takes them."""
        return ",".join(getattr(self, name) for name in KINDS)

    def numbers(self) -> list[float]:
        """Return the fields `NUMBERS`."""
        return [float(getattr(self, name)) for name in NUMBERS]

    @classmethod
    def of(cls, kinds: str, numbers: Sequence[float]) -> "PolicyOptions":
        """Undo `kinds` and `numbers`."""
        named: dict[str, Any] = dict(zip((*KINDS, *NUMBERS), (*kinds.split(","), *numbers), strict=True))
        return cls(**named)


CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
KINDS = ("loss_type", "level", "correction", "kl_estimator")
NUMBERS = tuple(name for name in PolicyOptions._fields if name not in KINDS)
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
    kl: Tensor  # estimate, perhaps bias-corrected, nats
    clip: Tensor  # -1 / +1 where the lower / upper clip bites


def token_terms(logprobs: Tensor, log_ratio: Tensor, tokens: Tokens, options: PolicyOptions) -> TokenTerms:
    """Compute the loss of each token and its two partial derivatives.

    Losses (c = exp(log_ratio), A = advantage, w = weight):
    `dapo`   -w * min(min(c, delta) * A, clamp(c, 1 - epsilon, 1 + epsilon_high) * A)   PPO / DAPO (eq. 8 of CF)
    `cispo`  -w * stop_gradient(min(c, epsilon_high)) * A * logprob
    `cispo_two_sided`   the same with clamp(c, 1 - epsilon, 1 + epsilon_high) (verl's `cispo`)
    `sapo`   -w * 4 / tau * sigmoid(tau * (c - 1)) * A, tau by the sign of A
    `dppo`   -w * stop_gradient(min(c, delta)) * A * logprob, or 0 where the probability has fallen by more than epsilon
             at A < 0, or risen by more than epsilon_high at A > 0 (DPPO's binary total variation, arXiv 2602.04879)
    `gmpo`   -w * c * A, c the geometric mean of clipped ratios, see `policy_terms`
    `reinforce`   -w * A * logprob, for which old log-probs matter to corrections and metrics only
    `vespo`  the same times a weight of the sequence, see `off_policy_factor`
    and then, unweighted, `+ beta * kl`, with g = ref - logprob: k3 = exp(g) - g - 1, k1 = -g, k2 = g^2 / 2, abs = |g|.

    log_ratio is `logprobs - old_logprobs` or its mean over a sequence, nats; all tensors have one shape.
    """
    inside = log_ratio <= LOG_RATIO_MAX
    ratio = log_ratio.clamp(max=LOG_RATIO_MAX).exp()
    weighted = tokens.advantages if tokens.weights is None else tokens.weights * tokens.advantages
    zero = torch.zeros_like(ratio)
    direct, via_ratio = zero, zero
    clipped_low = clipped_high = torch.zeros_like(inside)
    low, high = options.bounds

    if options.loss_type == "dapo":
        capped = ratio.clamp(max=options.delta)
        first, second = capped * weighted, ratio.clamp(low, high) * weighted
        loss = -torch.minimum(first, second)
        passes = torch.where(first <= second, ratio <= options.delta, (ratio >= low) & (ratio <= high))
        via_ratio = torch.where(passes & inside, -ratio * weighted, zero)
        clipped_low, clipped_high = (capped < low) & (weighted < 0), (capped > high) & (weighted > 0)
    elif options.loss_type in ("cispo", "cispo_two_sided"):
        direct = -ratio.clamp(low, high) * weighted
        loss = direct * logprobs
        clipped_low, clipped_high = (ratio < low) & (weighted < 0), (ratio > high) & (weighted > 0)
    elif options.loss_type == "sapo":
        # float32 constants in every dtype, as in TRL and in the kernel
        tau = torch.where(tokens.advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
        tau = tau.to(ratio.dtype)
        gate = torch.sigmoid(tau * (ratio - 1))
        loss = -4 / tau * gate * weighted
        via_ratio = -4 * gate * (1 - gate) * weighted * ratio  # 0 at the cut-off, where the gate is 1
    elif options.loss_type == "dppo":
        moved = logprobs.exp() - (logprobs if tokens.old_logprobs is None else tokens.old_logprobs).exp()
        clipped_low, clipped_high = (moved < low) & (weighted < 0), (moved > high) & (weighted > 0)
        cut = clipped_low | clipped_high | (log_ratio > LOG_RATIO_MAX)  # nan is not
        direct = torch.where(cut, zero, -ratio.clamp(max=options.delta) * weighted)
        loss = direct * logprobs
    elif options.loss_type == "gmpo":
        loss = -ratio * weighted
        via_ratio = torch.where(inside, loss, zero)
    elif options.loss_type in ("reinforce", "vespo"):
        loss, direct = -weighted * logprobs, -weighted
    else:
        raise ValueError(f"loss_type={options.loss_type!r} has no loss of a token")

    kl = zero
    if tokens.ref_logprobs is not None:
        gap = (tokens.ref_logprobs - logprobs).clamp(max=LOG_RATIO_MAX)
        kl, kl_slope = {
            "k1": lambda: (-gap, torch.ones_like(gap)),
            "k2": lambda: (gap**2 / 2, -gap),
            "k3": lambda: (gap.exp() - gap - 1, 1 - gap.exp()),
            "abs": lambda: (gap.abs(), -gap.sign()),
        }[options.kl_estimator]()
        kl_slope = torch.where(gap < LOG_RATIO_MAX, kl_slope, zero)
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
    G is inside and 0 outside (verl). With `vespo` that factor is part of a sequence's W, see `_gamma_weights`. A
    sequence of negative advantage is dropped whose mean of sampling - current exceeds `off_policy_mask_threshold`
    (DeepSeek-V3.2). None without `sampling_logprobs` and `vespo`.
    """
    if tokens.sampling_logprobs is None and options.loss_type != "vespo":
        return None
    low, high = options.sampling_clip_min, options.sampling_clip_max
    factor = torch.ones_like(logprobs)
    if options.correction:
        old = logprobs if tokens.old_logprobs is None else tokens.old_logprobs
        ratio = _sampling_gap(old, tokens, options.correction).clamp(max=LOG_RATIO_MAX).exp()
        inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
        kept = inside if options.correction in ("geometric_mask", "token_gate") else ratio * inside
        factor = factor * (ratio.clamp(low, high) if options.correction.endswith("truncate") else kept)
    if options.loss_type == "vespo":
        factor = _gamma_weights(logprobs, factor, tokens, options)
    if options.off_policy_mask_threshold != float("inf"):
        drift = -_sampling_gap(logprobs, tokens, "geometric")
        factor = factor * ((tokens.advantages >= 0) | (drift <= options.off_policy_mask_threshold))
    return factor


def _sampling_gap(logprobs: Tensor, tokens: Tokens, correction: str) -> Tensor:
    """Compute `logprobs - sampling`, 0 where there is none: of tokens (B, T), or its sum or mean over rows (B, 1)."""
    sampling, counted = tokens.sampling_logprobs, tokens.scale > 0
    assert sampling is not None
    gap = torch.where(counted & ~sampling.isnan(), logprobs - sampling, 0)
    if correction.startswith("token"):
        return gap
    total = gap.sum(1, keepdim=True)
    return total if correction.startswith("sequence") else total / counted.sum(1, keepdim=True).clamp(min=1)


def spread_correction(tokens: Tokens, options: PolicyOptions) -> tuple[Tokens, PolicyOptions]:
    """Make a sequence's correction (B, T) its tokens' own, where old log-probs tell it before any current ones.

    So that no pass over the rows has to find it. Sampling log-probs become those whose ratios are the sequence's.
    """
    old, mode = tokens.old_logprobs, options.correction
    if old is None or mode.startswith("token") or not mode or options._replace(correction="").joins_tokens:
        return tokens, options
    mode = "token_gate" if mode == "geometric_mask" else mode.replace("sequence", "token")
    sampling = old - _sampling_gap(old, tokens, options.correction)
    return tokens._replace(sampling_logprobs=sampling), options._replace(correction=mode)


def _gamma_weights(logprobs: Tensor, factor: Tensor, tokens: Tokens, options: PolicyOptions) -> Tensor:
    """Compute VESPO's weight (B, T) of a token's sequence, exp(lambda * (1 - W)) * W^k (arXiv 2602.10693, as in TRL).

    W is the product of ratios and of `factor` over the sequence; k and lambda depend on the sign of the advantage.
    """
    smallest, largest = math.log(1e-8), 20.0
    gap = torch.zeros_like(logprobs) if tokens.old_logprobs is None else logprobs - tokens.old_logprobs
    gap = gap.clamp(-largest, largest) + factor.log().clamp(smallest, largest)
    log_weight = torch.where(tokens.scale > 0, gap, 0).sum(1, keepdim=True).clamp(smallest, largest)
    risen = tokens.advantages >= 0
    # float32 constants in every dtype, as in TRL
    k = torch.where(risen, options.vespo_k_pos, options.vespo_k_neg).to(gap.dtype)
    rate = torch.where(risen, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4).to(gap.dtype)
    return (rate + k * log_weight - rate * log_weight.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)


def policy_terms(logprobs: Tensor, tokens: Tokens, options: PolicyOptions) -> tuple[TokenTerms, Tensor]:
    """Compute the terms (B, T) of a batch, and the derivative (B, T) of `sum(loss * scale)` by each log-prob.

    logprobs and the fields of `tokens` are (B, T), 0 where a token does not count. At the sequence level a token's
    log-ratio is the mean over the counted tokens of its sequence (GSPO). At the level "sequence_token" it has that
    value and its own log-prob's gradient (GSPO-token, arXiv 2507.18071, eq. 13). `gmpo` clips log-ratios before that,
    above epsilon_high at A > 0 and below -epsilon at A < 0, where they have no gradient (arXiv 2507.20673).
    """
    counted = tokens.scale > 0
    log_ratio = logprobs - (logprobs if tokens.old_logprobs is None else tokens.old_logprobs)
    clip = torch.zeros_like(log_ratio)
    if options.loss_type == "gmpo":
        sign, clamped = tokens.advantages.sign(), log_ratio.clamp(*options.bounds)
        clip = torch.where(sign * log_ratio > sign * clamped, sign, clip)
        log_ratio = torch.where(clip != 0, clamped, log_ratio)
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
    if options.loss_type == "gmpo":
        terms, via_ratio = terms._replace(clip=clip * tokens.moved()), torch.where(clip == 0, via_ratio, 0)
    return terms, direct + via_ratio


def refuse_second_derivative() -> None:
    """Raise `RuntimeError` in a backward with `create_graph=True`, for which a stored gradient would be a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("the policy loss has first derivatives only: run its backward without create_graph=True")


@triton.jit
def token_terms_triton(
    logprob, old_logprob, advantage, weight, ref_logprob,
    low, high, delta, beta, sapo_pos, sapo_neg, log_ratio_max,
    LOSS_TYPE: tl.constexpr, HAS_REF: tl.constexpr, CORRECT_KL: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """Return `token_terms` of one token at its level: (loss, d loss / d logprob, ratio, kl, clip), fp32 scalars."""
    # low and high: `PolicyOptions.bounds`.
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
    elif LOSS_TYPE == "cispo" or LOSS_TYPE == "cispo_two_sided":
        slope = -minimum(tl.where(ratio < low, low, ratio), high) * weighted
        loss = slope * logprob
        clip = tl.where((ratio > high) & (weighted > 0), 1.0, tl.where((ratio < low) & (weighted < 0), -1.0, 0.0))
    elif LOSS_TYPE == "dppo":
        moved = tl.exp(logprob) - tl.exp(old_logprob)
        clip = tl.where((moved > high) & (weighted > 0), 1.0, tl.where((moved < low) & (weighted < 0), -1.0, 0.0))
        slope = tl.where((clip != 0.0) | (log_ratio > log_ratio_max), 0.0, -minimum(ratio, delta) * weighted)
        loss = slope * logprob
    elif LOSS_TYPE == "reinforce":
        slope = -weighted
        loss = slope * logprob
    else:
        tl.static_assert(LOSS_TYPE == "sapo", "a loss type without a branch of `token_terms_triton`")
        tau = tl.where(advantage > 0, sapo_pos, sapo_neg)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        loss = -4.0 / tau * gate * weighted
        slope = -4.0 * gate * (1.0 - gate) * weighted * ratio
    kl = 0.0
    if HAS_REF:
        gap = minimum(ref_logprob - logprob, log_ratio_max)
        if KL == "k3":
            kl = tl.exp(gap) - gap - 1.0
            kl_slope = 1.0 - tl.exp(gap)
        elif KL == "k2":
            kl = gap * gap / 2
            kl_slope = -gap
        elif KL == "k1":
            kl = -gap
            kl_slope = gap * 0.0 + 1.0
        else:
            tl.static_assert(KL == "abs", "a KL estimator without a branch of `token_terms_triton`")
            kl = tl.abs(gap)
            kl_slope = tl.where(gap > 0, -1.0, tl.where(gap < 0, 1.0, 0.0))
        kl_slope = tl.where(gap < log_ratio_max, kl_slope, 0.0)
        if CORRECT_KL:
            kl = kl * ratio
            kl_slope = kl_slope * ratio + tl.where(inside, kl, 0.0)
        loss += beta * kl
        slope += beta * kl_slope
    return loss, slope, ratio, kl, clip
