"""Define the loss of a token in plain PyTorch, once for every form of the loss; autograd differentiates it.

A loss type is a formula here and a record of `types.LOSS_TYPES`. A formula may detach what has no gradient; it need
not know of levels, corrections and the KL term, which `policy_terms` adds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .options import LossOptions
from .types import LOSS_TYPES

LOG_RATIO_MAX = 40.0  # nats: the cut-off of log-ratios, so that no ratio overflows float32; the gradient beyond is 0


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
    """Results of `policy_terms`, (B, T) each."""

    loss: Tensor  # of the token, before aggregation
    ratio: Tensor
    kl: Tensor  # estimate, perhaps bias-corrected, nats
    clip: Tensor  # -1 / +1 where the lower / upper clip bites


class Inputs(NamedTuple):
    """Inputs of a formula, (B, T) each; log-probs and ratio have gradients."""

    logprobs: Tensor
    ratio: Tensor  # at its level
    log_ratio: Tensor  # before the cut-off
    old_logprobs: Tensor
    advantages: Tensor
    weighted: Tensor  # advantages times weights
    options: LossOptions

    def outside(self, value: Tensor) -> Tensor:
        """Find -1 / +1 where `value` is below / above its bounds."""
        low, high = self.options.bounds
        return (value > high).to(value.dtype) - (value < low).to(value.dtype)

    def clip(self, value: Tensor) -> Tensor:
        """Find those where the advantage moves it further out."""
        outside = self.outside(value)
        return outside * (outside * self.weighted > 0)


Formula = Callable[[Inputs], tuple[Tensor, Tensor]]
FORMULAS: dict[str, Formula] = {}
"""Each gives the loss of a token, and -1 / +1 where a lower / upper clip bites."""


def formula(function: Formula) -> Formula:
    """Let records name a formula."""
    FORMULAS[function.__name__] = function
    return function


@formula
def clipped(t: Inputs) -> tuple[Tensor, Tensor]:
    """The pessimistic one of the capped and of the clipped ratio, of PPO and DAPO (eq. 8 of CF)."""
    capped = t.ratio if t.options.delta is None else t.ratio.clamp(max=t.options.delta)
    first, second = capped * t.weighted, t.ratio.clamp(*t.options.bounds) * t.weighted
    return -torch.where(first <= second, first, second), t.clip(capped.detach())


@formula
def cispo(t: Inputs) -> tuple[Tensor, Tensor]:
    """The clipped ratio as a factor of the log-prob; verl's has a lower bound too."""
    ratio = t.ratio.detach()
    return -ratio.clamp(*t.options.bounds) * t.weighted * t.logprobs, t.clip(ratio)


@formula
def sapo(t: Inputs) -> tuple[Tensor, Tensor]:
    """A gate in place of the clip, steeper or softer by the sign of the advantage."""
    # float32 constants in every dtype, as in TRL
    tau = torch.where(t.advantages > 0, t.options.sapo_temperature_pos, t.options.sapo_temperature_neg)
    tau = tau.to(t.ratio.dtype)
    return -4 / tau * torch.sigmoid(tau * (t.ratio - 1)) * t.weighted, torch.zeros_like(t.weighted)


@formula
def dppo(t: Inputs) -> tuple[Tensor, Tensor]:
    """The ratio as a factor, 0 where the probability has moved too far (binary total variation, arXiv 2602.04879)."""
    clip = t.clip(t.logprobs.detach().exp() - t.old_logprobs.exp())
    ratio = t.ratio.detach().clamp(max=t.options.delta or math.inf)
    return -torch.where((clip != 0) | (t.log_ratio > LOG_RATIO_MAX), 0, ratio * t.weighted) * t.logprobs, clip


@formula
def ipo(t: Inputs) -> tuple[Tensor, Tensor]:
    """The ratio, 0 where the probability has moved too far, whatever the advantage's sign (prime-rl's default)."""
    clip = t.outside(t.logprobs.detach().exp() - t.old_logprobs.exp()) * (t.weighted != 0)
    return -torch.where(clip != 0, 0, t.ratio * t.weighted), clip


@formula
def gmpo(t: Inputs) -> tuple[Tensor, Tensor]:
    """The geometric mean of ratios that `policy_terms` has clipped token by token."""
    return -t.ratio * t.weighted, torch.zeros_like(t.weighted)


@formula
def reinforce(t: Inputs) -> tuple[Tensor, Tensor]:
    """The log-prob; old ones matter to corrections and metrics only. vespo weighs sequences, see `gamma_weights`."""
    return -t.weighted * t.logprobs, torch.zeros_like(t.weighted)


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: -gap,
    "k2": lambda gap: gap**2 / 2,
    "k3": lambda gap: gap.exp() - gap - 1,
    "abs": torch.abs,
}
"""Estimates of the divergence from the log-prob of the reference less the policy's."""


def policy_terms(logprobs: Tensor, tokens: Tokens, options: LossOptions) -> TokenTerms:
    """Compute the terms of a batch; the loss is differentiable in logprobs.

    logprobs and the fields of `tokens` are (B, T), 0 where a token does not count. At the sequence level a token's
    log-ratio is the mean over the counted tokens of its sequence (GSPO). At the level "sequence_token" it has that
    value and its own log-prob's gradient (GSPO-token, arXiv 2507.18071, eq. 13). `gmpo` clips log-ratios before that,
    above epsilon_high at A > 0 and below -epsilon at A < 0, where they have no gradient (arXiv 2507.20673). The KL term
    is not weighted.
    """
    current, clip_before = logprobs.detach(), None
    old = current if tokens.old_logprobs is None else tokens.old_logprobs
    log_ratio = logprobs - old
    if options.loss_type == "gmpo":
        sign, clamped = tokens.advantages.sign(), log_ratio.detach().clamp(*options.bounds)
        clip_before = torch.where(sign * log_ratio > sign * clamped, sign, 0)
        log_ratio = torch.where(clip_before != 0, clamped, log_ratio)
    if options.importance_sampling_level != "token":
        counted = tokens.scale > 0
        sums = torch.where(counted, log_ratio, 0).sum(1, keepdim=True)
        mean = (sums / counted.sum(1, keepdim=True).clamp(min=1)).expand_as(logprobs)
        if options.importance_sampling_level == "sequence_token":
            mean = mean.detach() + (log_ratio - log_ratio.detach()).nan_to_num()  # 0, with a gradient
        log_ratio = mean
    ratio = log_ratio.clamp(max=LOG_RATIO_MAX).exp()

    weighted = tokens.advantages if tokens.weights is None else tokens.weights * tokens.advantages
    if (factor := off_policy_factor(current, tokens, options)) is not None:
        weighted = factor * weighted
    inputs = Inputs(logprobs, ratio, log_ratio, old, tokens.advantages, weighted, options)
    loss, clip = FORMULAS[LOSS_TYPES[options.loss_type].formula](inputs)
    if clip_before is not None:
        clip = clip_before * (weighted != 0)
    kl = torch.zeros_like(loss)
    if tokens.ref_logprobs is not None:
        kl = KL[options.kl_estimator]((tokens.ref_logprobs - logprobs).clamp(max=LOG_RATIO_MAX))
        if options.use_bias_correction_kl:
            kl = kl * ratio
        if options.beta:
            loss = loss + options.beta * kl
    return TokenTerms(loss, ratio.detach(), kl.detach(), clip)


def policy_gradient(logprobs: Tensor, tokens: Tokens, options: LossOptions) -> tuple[TokenTerms, Tensor]:
    """Compute the terms (B, T), detached, and the derivative (B, T) of `sum(loss * scale)` by each log-prob."""
    if torch.is_inference_mode_enabled():  # whose tensors autograd does not take
        with torch.inference_mode(False):
            return policy_gradient(logprobs.clone(), tokens.map(Tensor.clone), options)
    # The body of an operator runs below autograd, which is let in again. `torch.func`, which would need no private
    # names, fails inside a checkpoint and under a `TorchDispatchMode`. A checkpoint's hooks would run the loss again.
    key = torch._C.DispatchKey.AutogradFunctionality
    without_hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad(), without_hooks:
        logprobs = logprobs.detach().requires_grad_()
        terms = policy_terms(logprobs, tokens, options)
        (by_logprob,) = torch.autograd.grad(terms.loss, logprobs, tokens.scale)
    return terms._replace(loss=terms.loss.detach()), by_logprob


def off_policy_factor(logprobs: Tensor, tokens: Tokens, options: LossOptions) -> Tensor | None:
    """Compute the factor (B, T), without gradient, of each token's policy term: `correction`, vespo's and the mask."""
    factor = correction(logprobs, tokens, options)
    if options.loss_type == "vespo":
        factor = gamma_weights(logprobs, factor, tokens, options)
    if options.off_policy_mask_threshold is None:
        return factor
    kept = drift_mask(logprobs, tokens, options.off_policy_mask_threshold).to(logprobs.dtype)
    return kept if factor is None else factor * kept


def correction(logprobs: Tensor, tokens: Tokens, options: LossOptions) -> Tensor | None:
    """Compute the factor (B, T) of `sampling_mode` for rollouts of another policy, None without one.

    With r = exp(old - sampling), 1 for a token without a sampling log-prob, and R the product, G the geometric mean of
    r over a sequence: `token_truncate` clamps r to [sampling_clip_min, sampling_clip_max], `token_mask` takes r inside
    that band and 0 outside (with both bounds: IcePop, 2510.18855); `sequence_truncate` and `sequence_mask` do so with R
    (TRL), and `geometric_mask` takes 1 where G is inside and 0 outside (verl).
    """
    if (mode := options.sampling_mode) is None:
        return None
    low, high = options.sampling_clip_min or 0.0, options.sampling_clip_max or math.inf
    old = logprobs if tokens.old_logprobs is None else tokens.old_logprobs
    ratio = _sampling_gap(old, tokens, mode).clamp(max=LOG_RATIO_MAX).exp().expand_as(logprobs)
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    inside = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    return inside if mode == "geometric_mask" else ratio * inside


def drift_mask(logprobs: Tensor, tokens: Tokens, threshold: float) -> Tensor:
    """Find (B, T) the tokens of sequences that stay: of a negative advantage if they have drifted at most so far.

    The drift is the mean of sampling - current log-probs over a sequence, nats (DeepSeek-V3.2).
    """
    return (tokens.advantages >= 0) | (-_sampling_gap(logprobs, tokens, "geometric") <= threshold)


def _sampling_gap(logprobs: Tensor, tokens: Tokens, mode: str) -> Tensor:
    """Compute `logprobs - sampling`, 0 where there is none: of tokens (B, T), or its sum or mean over rows (B, 1)."""
    sampling, counted = tokens.sampling_logprobs, tokens.scale > 0
    assert sampling is not None
    gap = torch.where(counted & ~sampling.isnan(), logprobs - sampling, 0)
    if mode.startswith("token"):
        return gap
    total = gap.sum(1, keepdim=True)
    return total if mode.startswith("sequence") else total / counted.sum(1, keepdim=True).clamp(min=1)


def fold_correction(tokens: Tokens, options: LossOptions) -> tuple[Tokens, LossOptions]:
    """Put a correction into the weights (B, T) where old log-probs tell it before any current ones."""
    if tokens.old_logprobs is None or options.sampling_mode is None or options.loss_type == "vespo":
        return tokens, options
    factor = correction(tokens.old_logprobs, tokens, options)
    weights = factor if tokens.weights is None or factor is None else tokens.weights * factor
    return tokens._replace(weights=weights), options.but(sampling_mode=None)


def gamma_weights(logprobs: Tensor, factor: Tensor | None, tokens: Tokens, options: LossOptions) -> Tensor:
    """Compute VESPO's weight (B, T) of a token's sequence, exp(lambda * (1 - W)) * W^k (arXiv 2602.10693, as in TRL).

    W is the product of ratios and of `factor` over the sequence; k and lambda depend on the sign of the advantage.
    """
    smallest, largest = math.log(1e-8), 20.0
    gap = torch.zeros_like(logprobs) if tokens.old_logprobs is None else logprobs - tokens.old_logprobs
    gap = gap.clamp(-largest, largest)
    if factor is not None:
        gap = gap + factor.log().clamp(smallest, largest)
    log_weight = torch.where(tokens.scale > 0, gap, 0).sum(1, keepdim=True).clamp(smallest, largest)
    risen = tokens.advantages >= 0
    # float32 constants in every dtype, as in TRL
    k = torch.where(risen, options.vespo_k_pos, options.vespo_k_neg).to(gap.dtype)
    rate = torch.where(risen, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4).to(gap.dtype)
    return (rate + k * log_weight - rate * log_weight.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)


def refuse_second_derivative() -> None:
    """Raise `RuntimeError` in a backward with `create_graph=True`, for which a stored gradient would be a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("the policy loss has first derivatives only: run its backward without create_graph=True")
