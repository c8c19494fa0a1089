"""From drops to token weights, and the whole way from padded batches of sampled tokens to weights.

`counterfactual_credit` is what trainers call once per generation batch: answers and spans of the completions
that matter, one scoring call, a weight for every token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .answer_text import AnswerFormat, check_answer_options
from .scoring import CounterfactualScores, ScoringWork, score_counterfactuals
from .spans import Detector, Span, checked_span_options, find_answers, find_answers_and_spans

MODES = ("counterfactual", "inverted", "random", "uniform")
NORMALIZATIONS = (None, "mean")

# Importances closer than this (nats) count as equal: eq. 6 would blow rounding up to the whole weight range.
_EQUAL_NATS = 1e-6


@dataclass(frozen=True)
class CounterfactualConfig:
    """How credit is assigned; the defaults are the CF paper's. Raises `ValueError` naming a bad field."""

    mode: str = "counterfactual"
    """counterfactual, inverted (high importance gets low weight), random, or uniform (all weights 1)."""
    w_min: float = 0.5
    """Weight of the least important span of a completion."""
    w_max: float = 4.0
    """Weight of its most important span."""
    w_answer: float = 1.5
    """Weight of the answer's tokens."""
    normalize: str | None = None
    """\"mean\" rescales each completion's weights to mean 1; None, as in the paper, does not."""
    detector: str | Detector = "math"
    """What counts as a span, see `detect_spans`."""
    max_spans: int = 10
    """Most spans per completion (K_max)."""
    selection: str = "first"
    """Which spans stay when there are more, see `detect_spans`."""
    answer_format: AnswerFormat | None = None
    """The run's own form of answers, a pattern or a function, see `answer_text_span`; None knows the usual forms."""
    answer_fallback: str | None = None
    """\"last_number\" takes the last number where no answer is marked; None takes nothing."""
    placeholder_id: int | None = None
    """Id that replaces masked tokens; None takes the tokenizer's pad token, else its end-of-text token."""
    token_budget: int | None = None
    """Most tokens per packed forward; None by free memory."""

    def __post_init__(self) -> None:
        _check_options(self.mode, self.w_min, self.w_max, self.w_answer, self.normalize)
        checked_span_options(self.detector, self.max_spans, self.selection)
        check_answer_options(self.answer_format, self.answer_fallback)


@dataclass(frozen=True)
class Credit:
    """Weights of a (B, T) batch and what they came from; unscored rows have no spans.

    Attributes:
        weights: (B, T) fp32, 1 on padding and on rows without credit.
        answers: B spans or None.
        spans: B lists of masked spans.
        drop: B tensors (K_b,) fp32 on the CPU, nats.
        base: (B,) fp32 on the CPU, log P(answer), nats; nan where not scored.
        logprobs: (B, T) fp32 log-probs of the completion tokens, 0 on padding, if asked for.
        work: what the scoring did; None where no row was scored.
    """

    weights: Tensor
    answers: list[Span | None]
    spans: list[list[Span]]
    drop: list[Tensor]
    base: Tensor
    logprobs: Tensor | None
    work: ScoringWork | None

    def metrics(self, completion_mask: Tensor) -> dict[str, float]:
        """Figures to log; `completion_mask` is (B, T). Drops are in nats, negative for spans that matter."""
        tokens = self.weights[completion_mask.bool()].float()
        drops = torch.cat([drop for drop in self.drop if len(drop)] or [torch.zeros(0)])
        scored = [i for i, spans in enumerate(self.spans) if spans]
        found = {
            "credit/weight_mean": tokens.mean().item() if len(tokens) else 1.0,
            "credit/weight_std": tokens.std(correction=0).item() if len(tokens) else 0.0,
            "credit/scored_fraction": len(scored) / max(len(self.spans), 1),
            "credit/spans_mean": sum(len(self.spans[i]) for i in scored) / max(len(scored), 1),
            "credit/tokens_fed": float(self.work.tokens_fed if self.work else 0),
            "credit/forwards": float(self.work.forwards if self.work else 0),
        }
        if len(drops):
            found |= {
                "credit/drop_mean": drops.mean().item(),
                "credit/drop_min": drops.min().item(),
                "credit/distractor_fraction": (drops > 0).float().mean().item(),
            }
        return found


def span_weights(
    drop: Tensor,
    spans: Sequence[Span],
    answer: Span | None,
    length: int,
    *,
    mode: str = "counterfactual",
    w_min: float = 0.5,
    w_max: float = 4.0,
    w_answer: float = 1.5,
    normalize: str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Token weights of one completion from the drops of its spans (CF paper, eqs. 4, 6 and 7).

    Importance `-drop` is min-max normalised over the spans and mapped to `[w_min, w_max]`. Tokens outside every
    span weigh 1, answer tokens `w_answer`. One span, or importances that are all equal, weigh 1: there is
    nothing to tell apart (eq. 6 would give all of them `w_min`). A token in several spans takes the largest
    importance among them.

    Args:
        drop: (K,) masked minus base log-prob of the answer, nats, one per span.
        spans: K half-open token spans.
        answer: the answer's tokens, or None.
        length: completion tokens.
        mode: `counterfactual`; `inverted` (one minus the normalised importance); `random` (each token
            outside the answer uniform in `[w_min, w_max]`; spans and drops are not looked at); `uniform` (all 1,
            the answer too).
        w_min, w_max, w_answer: finite weights >= 0, `w_min <= w_max`.
        normalize: `"mean"` rescales the result to mean 1; None leaves it.
        generator: source of the random mode, on the CPU; default torch's global one.

    Returns:
        (length,) fp32 on drop's device.

    Raises:
        ValueError: options, shapes, spans outside the completion or non-finite drops; names argument and value.
    """
    _check_options(mode, w_min, w_max, w_answer, normalize)
    if drop.ndim != 1 or len(drop) != len(spans):
        raise ValueError(f"drop must hold one value per span: got shape {tuple(drop.shape)} for {len(spans)} spans")
    for k, (start, end) in enumerate(spans):
        if not 0 <= start < end <= length:
            raise ValueError(f"spans, span {k}: {(start, end)} is not inside a completion of {length} tokens")
    if answer is not None and not 0 <= answer[0] < answer[1] <= length:
        raise ValueError(f"answer: {tuple(answer)} is not inside a completion of {length} tokens")

    weights = torch.ones(length, dtype=torch.float32)
    if mode == "random":
        weights.uniform_(w_min, w_max, generator=generator)
    elif mode != "uniform" and len(spans):
        values = drop.detach().float().cpu()
        if not torch.isfinite(values).all():
            k = int((~torch.isfinite(values)).nonzero()[0])
            raise ValueError(f"drop, span {k}: must be finite, got {values[k].item()}")
        importance = -values
        low, high = importance.min(), importance.max()
        if high - low > _EQUAL_NATS:
            normalized = torch.full((length,), -1.0)
            for (start, end), value in zip(spans, (importance - low) / (high - low), strict=True):
                normalized[start:end] = normalized[start:end].clamp(min=value)
            covered = normalized >= 0
            share = 1 - normalized if mode == "inverted" else normalized
            weights[covered] = w_min + share[covered] * (w_max - w_min)
    if answer is not None and mode != "uniform":
        weights[answer[0] : answer[1]] = w_answer
    if normalize == "mean" and length:
        mean = weights.mean()
        if mean == 0:
            raise ValueError("normalize='mean' needs a weight above 0, all are 0")
        weights /= mean
    return weights.to(drop.device)


def _check_options(mode: str, w_min: float, w_max: float, w_answer: float, normalize: str | None) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be one of {NORMALIZATIONS}, got {normalize!r}")
    for name, value in (("w_min", w_min), ("w_max", w_max), ("w_answer", w_answer)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    if w_min > w_max:
        raise ValueError(f"w_min must not exceed w_max, got {w_min} and {w_max}")


def counterfactual_weights(
    model: nn.Module,
    tokenizer: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    advantages: Tensor | None = None,
    config: CounterfactualConfig | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B, T) fp32 token weights of a padded batch: `counterfactual_credit(...).weights`."""
    return counterfactual_credit(
        model, tokenizer, prompt_ids, prompt_mask, completion_ids, completion_mask,
        advantages=advantages, config=config, generator=generator,
    ).weights  # fmt: skip


def counterfactual_credit(
    model: nn.Module,
    tokenizer: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    advantages: Tensor | None = None,
    config: CounterfactualConfig | None = None,
    generator: torch.Generator | None = None,
    logprobs: bool = False,
    temperature: float = 1.0,
    score: Callable[..., CounterfactualScores] | None = None,
) -> Credit:
    """Find answers and spans, score them, and weigh every token of a batch laid out as TRL does.

    Args:
        model: as in `score_counterfactuals`.
        tokenizer: the one that sampled the ids.
        prompt_ids, prompt_mask: (B, P), left-padded; the mask is 1 on real tokens.
        completion_ids, completion_mask: (B, T), right-padded. A row masked out altogether (a truncated completion,
            say) gets no credit.
        advantages: (B,) or (B, T). Rows that are zero throughout contribute nothing to the loss, so they are not
            scored and weigh 1.
        config: default `CounterfactualConfig()`.
        generator: source of the random mode, on the CPU.
        logprobs: also return the log-prob of every completion token of every row, from the same forwards.
        temperature: divides the logits of those log-probs (not of the answer scores).
        score: called in place of `score_counterfactuals`, with its arguments; for a host whose
            model lies in other processes (`model` is then only handed on).

    Returns:
        `Credit`; `weights` on completion_ids' device.

    Raises:
        ValueError: shapes or masks that are not as described, an empty prompt; names the row.
        Also whatever `score_counterfactuals` raises.
    """
    config = config or CounterfactualConfig()
    prompts = _unpad("prompt", prompt_ids, prompt_mask, left=True)
    completions = _unpad("completion", completion_ids, completion_mask, left=False)
    if len(prompts) != len(completions):
        raise ValueError(f"completion_ids has {len(completions)} rows, prompt_ids has {len(prompts)}")
    credited = [b for b in _rows_with_advantage(advantages, completion_ids) if len(completions[b])]
    batch = len(prompts)
    answers: list[Span | None] = [None] * batch
    spans: list[list[Span]] = [[] for _ in range(batch)]
    if config.mode != "uniform":
        ids = {b: completions[b].tolist() for b in credited}
        own, fallback = config.answer_format, config.answer_fallback
        if config.mode == "random":
            some = find_answers(ids, tokenizer, answer_format=own, answer_fallback=fallback)
            found = {b: (answer, spans[b]) for b, answer in some.items()}
        else:
            found = find_answers_and_spans(
                ids, tokenizer, detector=config.detector, max_spans=config.max_spans, selection=config.selection,
                answer_format=own, answer_fallback=fallback,
            )  # fmt: skip
        for b, (answer, row_spans) in found.items():
            answers[b], spans[b] = answer, row_spans
    to_score = [b for b in range(batch) if (len(completions[b]) if logprobs else spans[b])]
    scores: CounterfactualScores | None = None
    if to_score:
        scores = (score or score_counterfactuals)(
            model,
            [prompts[b] for b in to_score],
            [completions[b] for b in to_score],
            [spans[b] for b in to_score],
            [answers[b] if spans[b] else None for b in to_score],
            placeholder_id=_placeholder(config, tokenizer),
            token_budget=config.token_budget,
            logprobs=logprobs,
            temperature=temperature,
        )
    drop, base = _on_host(scores, to_score, batch)
    weights = torch.ones(completion_ids.shape, dtype=torch.float32)
    for b in credited:
        weights[b, : len(completions[b])] = span_weights(
            drop[b], spans[b], answers[b], len(completions[b]), mode=config.mode, w_min=config.w_min,
            w_max=config.w_max, w_answer=config.w_answer, normalize=config.normalize, generator=generator,
        )  # fmt: skip
    padded = None
    if logprobs and scores is not None and scores.logprobs is not None:
        padded = torch.zeros(completion_ids.shape, dtype=torch.float32)
        for b, row in zip(to_score, scores.logprobs, strict=True):
            padded[b, : len(row)] = row
        padded = padded.to(completion_ids.device)
    return Credit(
        weights.to(completion_ids.device), answers, spans, drop, base, padded, scores.work if scores else None
    )


def _unpad(name: str, ids: Tensor, mask: Tensor, *, left: bool) -> list[Tensor]:
    """The real tokens of each row, as views on the host; one copy for the whole batch."""
    if ids.ndim != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"{name}_ids and {name}_mask must be one (B, length) shape, got {tuple(ids.shape)} and {tuple(mask.shape)}"
        )
    ids, mask = ids.cpu(), mask.cpu().bool()
    width, lengths = ids.shape[1], mask.sum(1).tolist()
    rows = []
    for b, length in enumerate(lengths):
        real = slice(width - length, width) if left else slice(0, length)
        if length == 0 and left:
            raise ValueError(f"{name}_mask row {b}: is all zero, the {name} is empty")
        if not bool(mask[b, real].all()):
            side = "left" if left else "right"
            raise ValueError(f"{name}_mask row {b}: must be padded on the {side} alone, without gaps")
        rows.append(ids[b, real])
    return rows


def _rows_with_advantage(advantages: Tensor | None, completion_ids: Tensor) -> list[int]:
    batch = len(completion_ids)
    if advantages is None:
        return list(range(batch))
    if advantages.shape not in ((batch,), tuple(completion_ids.shape)):
        raise ValueError(
            f"advantages must be (B,) or (B, T) of {tuple(completion_ids.shape)}, got {tuple(advantages.shape)}"
        )
    nonzero = (advantages.reshape(batch, -1) != 0).any(1)
    return nonzero.nonzero().flatten().tolist()


def _placeholder(config: CounterfactualConfig, tokenizer: Any) -> int:
    for token in (config.placeholder_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("placeholder_id: the tokenizer has neither a pad nor an end-of-text token; name one")


def _on_host(scores: CounterfactualScores | None, scored: list[int], batch: int) -> tuple[list[Tensor], Tensor]:
    """Drops and base scores of all rows on the CPU, by one copy each."""
    drop = [torch.zeros(0)] * batch
    base = torch.full((batch,), float("nan"))
    if scores is None:
        return drop, base
    flat = torch.cat(scores.drop).cpu()
    for b, row in zip(scored, flat.split([len(row) for row in scores.drop]), strict=True):
        drop[b] = row
    base[scored] = scores.base.cpu()
    return drop, base
