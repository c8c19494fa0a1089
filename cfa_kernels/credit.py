"""Credit: the whole way from padded batches of sampled tokens to the weight, or the advantage, of every token.

`counterfactual_credit` is what trainers call once per generation batch: answers and units of the completions that
matter, an estimator of their importance (`estimators.py`), a reshaping to weights (`reshaping.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .answer_text import AnswerFormat, check_answer_options
from .estimators import ESTIMATORS, CreditBatch, Estimator, EstimatorKind, Importances, masking
from .outcomes import OUTCOMES
from .reshaping import (
    Reshape,
    bilevel_weights,
    check_mode,
    check_range,
    identity_weights,
    normalized_weights,
    random_weights,
    range_weights,
    spread_over_tokens,
    top_threshold,
    top_weights,
)
from .scoring import CounterfactualScores, ScoringWork, score_counterfactuals
from .spans import Detector, Reasoning, Span, checked_span_options, find_reasoning

UNITS = ("spans", "tokens")
RESHAPINGS = ("range", "bilevel", "top", "identity")


@dataclass(frozen=True)
class CounterfactualConfig:
    """How credit is assigned; the defaults are the CF paper's. Raises `ValueError` naming a bad field."""

    mode: str = "counterfactual"
    """counterfactual, or a control: inverted (high importance gets low weight), random, uniform (all weights 1)."""
    estimator: str | Estimator = "masking"
    """What finds the importance of a unit: a name in `ESTIMATORS`, or a function (model, `CreditBatch`) ->
    `Importances`."""
    units: str | None = None
    """What is judged as one: "spans" (of `detector`), or "tokens", each by itself: those before the answer's marker
    where an answer is needed, else all. None takes what the estimator's source does."""
    outcome: str | None = None
    """What masking and gradient watch: "logprob" or "mean_logprob" of the answer, or the distribution of its first
    token ("last") or of its mean logits ("mean"). None takes what the estimator's source does."""
    reshape: str | Reshape | None = None
    """How importances become weights: "range" (w_min, w_max, w_answer), "bilevel" (tau, boost, floor), "top"
    (fraction), "identity", or a function. None takes what the estimator's source does."""
    w_min: float = 0.5
    """Weight of the least important span of a completion."""
    w_max: float = 4.0
    """Weight of its most important span."""
    w_answer: float = 1.5
    """Weight of the answer's tokens under "range"."""
    tau: float = 0.4
    """Quantile of a completion's importances below which "bilevel" suppresses."""
    boost: float = 2.0
    """How much more than at the threshold the most important token weighs under "bilevel", before the rescaling."""
    floor: float = 0.0
    """Least weight under "bilevel", before the rescaling."""
    fraction: float = 0.2
    """Share of the tokens of the batch that "top" keeps."""
    sigma: float = 1e-3
    """Standard deviation of the noise under "gradient", in the embeddings' own scale; 0 for plain gradient x input."""
    samples: int = 1
    """Draws of that noise to average."""
    correct_threshold: float = 0.5
    """A completion with at least this reward counts as correct, for "ktae" and "sibling_edits"."""
    normalize: str | None = None
    """\"mean\" rescales each completion's weights to mean 1, unless all are 0; None, as in the CF paper, does not."""
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
        check_mode(self.mode, self.normalize)
        check_range(self.w_min, self.w_max, self.w_answer)
        checked_span_options(self.detector, self.max_spans, self.selection)
        check_answer_options(self.answer_format, self.answer_fallback)
        for name, among in (("estimator", tuple(ESTIMATORS)), ("reshape", RESHAPINGS)):
            value = getattr(self, name)
            if not callable(value) and value not in among and (name == "estimator" or value is not None):
                raise ValueError(f"{name} must be a function or one of {', '.join(among)}, got {value!r}")
        for name, among in (("units", UNITS), ("outcome", OUTCOMES)):
            if getattr(self, name) not in (None, *among):
                raise ValueError(f"{name} must be one of {', '.join(among)}, got {getattr(self, name)!r}")
        for name in ("tau", "floor", "fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not abs(self.correct_threshold) < float("inf"):
            raise ValueError(f"correct_threshold must be finite, got {self.correct_threshold}")
        for name in ("boost", "sigma"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples must be an integer of at least 1, got {self.samples!r}")
        if self.outcome is not None and "outcome" not in self.kind.options:
            raise ValueError(f"outcome: estimator={self.estimator!r} watches none, got {self.outcome!r}")

    @property
    def kind(self) -> EstimatorKind:
        """How the estimator is called; a function judges spans, and is given every completion of the batch."""
        if callable(self.estimator):
            return EstimatorKind(self.estimator, "spans", "range", False, True, True)
        return ESTIMATORS[self.estimator]


@dataclass(frozen=True)
class Credit:
    """Weights of a (B, T) batch and what they came from; unscored rows have no spans.

    Attributes:
        weights: (B, T) fp32, 1 on padding and on rows without credit.
        answers: B spans or None.
        spans: B lists of the units that were judged.
        drop: B tensors (K_b,) fp32 on the CPU, minus the importance of each unit; of masking, as the answer's
            log-prob changes, in nats.
        base: (B,) fp32 on the CPU, log P(answer), nats; nan where it was not scored.
        logprobs: (B, T) fp32 log-probs of the completion tokens, 0 on padding, if asked for.
        work: what the estimator fed; None where it fed nothing.
        advantages: (B, T) fp32, what to train on in place of `advantages`, where the estimator's values are signed;
            else None.
    """

    weights: Tensor
    answers: list[Span | None]
    spans: list[list[Span]]
    drop: list[Tensor]
    base: Tensor
    logprobs: Tensor | None
    work: ScoringWork | None
    advantages: Tensor | None = None

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
    groups: Tensor | None = None,
    rewards: Tensor | None = None,
    entropies: Tensor | None = None,
    external: Sequence[Tensor] | None = None,
) -> Credit:
    """Find answers and units, judge them, and weigh every token of a batch laid out as TRL does.

    Args:
        model: as in `score_counterfactuals`; estimators that compare completions alone do not look at it.
        tokenizer: the one that sampled the ids.
        prompt_ids, prompt_mask: (B, P), left-padded; the mask is 1 on real tokens.
        completion_ids, completion_mask: (B, T), right-padded. A row masked out altogether (a truncated completion,
            say) gets no credit.
        advantages: (B,) or (B, T). Rows that are zero throughout contribute nothing to the loss, so they are not
            judged and weigh 1. Needed where the estimator's values are signed.
        config: default `CounterfactualConfig()`.
        generator: source of the random mode and of what an estimator draws, on the CPU.
        logprobs: also return the log-prob of every completion token of every row; with masking from the same forwards.
        temperature: divides the logits of those log-probs (not of the answer scores).
        score: called in place of `score_counterfactuals`, with its arguments; for a host whose
            model lies in other processes (`model` is then only handed on).
        groups: (B,) int64, equal for completions that are compared with each other; default: equal prompts.
        rewards: (B,) float, for estimators that compare the completions of a group.
        entropies: (B, T) of each sampled token's distribution, nats, for `entropy`.
        external: B tensors with a number for each unit or each token of the completion, for `external`.

    Returns:
        `Credit`; `weights` and `advantages` on completion_ids' device.

    Raises:
        ValueError: shapes or masks that are not as described, an empty prompt; an estimator that lacks what it reads,
            or gives values of the wrong number or that are not finite; names the row.
        Also whatever the estimator raises.
    """
    config = config or CounterfactualConfig()
    kind = config.kind
    prompts = _unpad("prompt", prompt_ids, prompt_mask, left=True)
    completions = _unpad("completion", completion_ids, completion_mask, left=False)
    batch = len(prompts)
    if len(completions) != batch:
        raise ValueError(f"completion_ids has {len(completions)} rows, prompt_ids has {batch}")
    _check_columns(completion_ids, groups=groups, rewards=rewards, entropies=entropies, external=external)
    real = [b for b in range(batch) if len(completions[b])]
    credited = [b for b in _rows_with_advantage(advantages, completion_ids) if len(completions[b])]
    found = _find_units(config, tokenizer, {b: completions[b].tolist() for b in credited})
    judged = [b for b in credited if found[b].spans]
    scorer = _Scorer(score or score_counterfactuals, temperature)

    def laid_out(rows: Sequence[int]) -> CreditBatch:
        asked = [found.get(b, Reasoning(None, 0, [])) for b in rows]
        return CreditBatch(
            prompts=[prompts[b] for b in rows],
            completions=[completions[b] for b in rows],
            lengths=[len(completions[b]) for b in rows],
            units=[row.spans for row in asked],
            answers=[row.answer if row.spans else None for row in asked],
            reasoning_ends=[row.end for row in asked],
            placeholder_id=_placeholder(config, tokenizer) if kind.needs_answer or logprobs else None,
            token_budget=config.token_budget,
            generator=generator,
            groups=(_equal_prompts(prompts) if groups is None else groups.cpu())[list(rows)],
            rewards=None if rewards is None else rewards.detach().cpu()[list(rows)],
            correct_threshold=config.correct_threshold,
            ignored_ids=_ids_that_say_nothing(tokenizer) if kind.needs_siblings else (),
            advantages=None if advantages is None else advantages.detach().cpu()[list(rows)],
            entropies=None if entropies is None else [entropies[b, : len(completions[b])] for b in rows],
            external=None if external is None else [external[b] for b in rows],
            score=scorer,
        )

    importances, rows = Importances([]), list[int]()
    if judged and (config.mode in ("counterfactual", "inverted") or kind.needs_siblings):
        scorer.wants_logprobs = logprobs and kind.run is masking
        rows = real if scorer.wants_logprobs or kind.needs_siblings else judged
        given = laid_out(rows)
        options = {name: getattr(config, name) for name in kind.options if getattr(config, name) is not None}
        importances = kind.run(model, given, **options)
        _check_values(importances, given.units, rows)
    if logprobs and real and scorer.logprobs is None:
        scorer.wants_logprobs = True
        given = laid_out(real)
        scorer(
            model, given.prompts, given.completions, [[] for _ in real], [None for _ in real],
            placeholder_id=given.placeholder_id, token_budget=config.token_budget,
        )  # fmt: skip
    values = dict(zip(rows, importances.values, strict=True))
    lengths = {b: len(completions[b]) for b in credited}
    weights = torch.ones(completion_ids.shape, dtype=torch.float32)
    signed = None
    if importances.signed:
        signed = _token_advantages(config, advantages, completion_ids, values, found, generator)
    elif config.mode != "uniform":
        for b, row in _reshaped(config, values, found, lengths, generator).items():
            weights[b, : lengths[b]] = row
    scores = importances.scores
    base = torch.full((batch,), float("nan"))
    if scores is not None:
        base[rows] = scores.base.float().cpu()
    return Credit(
        weights=weights.to(completion_ids.device),
        answers=[found[b].answer if b in found else None for b in range(batch)],
        spans=[found[b].spans if b in found else [] for b in range(batch)],
        drop=[-values[b] if b in values else torch.zeros(0) for b in range(batch)],
        base=base,
        logprobs=_padded_logprobs(scorer.logprobs, real, completion_ids) if logprobs else None,
        work=importances.work or scorer.work,
        advantages=signed,
    )


class _Scorer:
    """`score`, asked for the log-probs of whole completions on the way where they are wanted."""

    def __init__(self, score: Callable[..., CounterfactualScores], temperature: float) -> None:
        self.score, self.temperature, self.wants_logprobs = score, temperature, False
        self.logprobs: list[Tensor] | None = None
        self.work: ScoringWork | None = None

    def __call__(self, *args: Any, **options: Any) -> CounterfactualScores:
        scores = self.score(*args, logprobs=self.wants_logprobs, temperature=self.temperature, **options)
        self.logprobs, self.work = scores.logprobs, scores.work
        return scores


def _find_units(config: CounterfactualConfig, tokenizer: Any, ids: Mapping[int, list[int]]) -> dict[int, Reasoning]:
    """Answer, end of the reasoning and units of completions by row number; no more than the mode and estimator need."""
    if config.mode == "uniform":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    kind = config.kind
    tokens = (config.units or kind.units) == "tokens"
    found = find_reasoning(
        ids, tokenizer, detector=None if tokens or _drawn_by_token(config) else config.detector,
        max_spans=config.max_spans, selection=config.selection, unanswered=not kind.needs_answer,
        answer_format=config.answer_format, answer_fallback=config.answer_fallback,
    )  # fmt: skip
    if not tokens or _drawn_by_token(config):
        return found
    judged = {
        b: (row.end if row.answer else 0) if kind.needs_answer else len(ids[b]) for b, row in found.items()
    }  # tokens of each row
    return {b: row._replace(spans=[Span(t, t + 1) for t in range(judged[b])]) for b, row in found.items()}


def _drawn_by_token(config: CounterfactualConfig) -> bool:
    """Whether weights are drawn as the CF paper draws them, which needs no units."""
    return config.mode == "random" and _reshaping(config) == "range" and not config.kind.needs_siblings


def _reshaping(config: CounterfactualConfig) -> str | Reshape:
    return config.reshape or config.kind.reshape


def _reshaped(
    config: CounterfactualConfig,
    values: Mapping[int, Tensor],
    found: Mapping[int, Reasoning],
    lengths: Mapping[int, int],
    generator: torch.Generator | None,
) -> dict[int, Tensor]:
    """The weights of each credited row, (length,) fp32."""
    how, inverted = _reshaping(config), config.mode == "inverted"
    limits: dict[str, Any] = {"w_min": config.w_min, "w_max": config.w_max, "w_answer": config.w_answer}
    if config.mode == "random" and how != "range":
        values = {b: torch.rand(len(row.spans), generator=generator) for b, row in found.items()}
    values = {b: values.get(b, torch.zeros(0)) for b in found}
    units = {b: row.spans if len(values[b]) else [] for b, row in found.items()}
    rows = list(found)
    threshold = top_threshold(
        [values[b] for b in rows], [units[b] for b in rows], [lengths[b] for b in rows], config.fraction
    )
    weights = {}
    for b, row in found.items():
        place = (values[b], units[b], row.answer, lengths[b])
        if how == "range" and config.mode == "random":
            line = random_weights(row.answer, lengths[b], generator=generator, **limits)
        elif how == "range":
            line = range_weights(*place, inverted=inverted, **limits)
        elif how == "bilevel":
            line = bilevel_weights(*place, tau=config.tau, boost=config.boost, floor=config.floor, inverted=inverted)
        elif how == "top":
            line = top_weights(*place, threshold=threshold, inverted=inverted)
        else:
            reshape = identity_weights if how == "identity" else how
            assert callable(reshape)
            line = _checked_weights(reshape(_turned(values[b]) if inverted else values[b], *place[1:]), b, lengths[b])
        weights[b] = normalized_weights(line, config.normalize) if line.any() else line
    return weights


def _turned(values: Tensor) -> Tensor:
    """The same range of values with the order reversed."""
    return values.max() + values.min() - values if len(values) else values


def _token_advantages(
    config: CounterfactualConfig,
    advantages: Tensor | None,
    completion_ids: Tensor,
    values: Mapping[int, Tensor],
    found: Mapping[int, Reasoning],
    generator: torch.Generator | None,
) -> Tensor:
    """(B, T) fp32 advantages with the signed values of each unit added to its tokens' own."""
    if advantages is None:
        raise ValueError(f"advantages must be given: estimator={config.estimator!r} adds to them, got None")
    own = advantages.detach().float()
    added = torch.zeros(completion_ids.shape)
    for b, row in found.items():
        line = values[b]
        if config.mode == "inverted":
            line = -line
        elif config.mode == "random":
            line = line[torch.randperm(len(line), generator=generator)]
        tokens = spread_over_tokens(line, row.spans, completion_ids.shape[1])
        added[b] = torch.where(tokens.isnan(), 0.0, tokens)
    return (own[:, None] if own.ndim == 1 else own) + added.to(own.device)


def _check_values(importances: Importances, units: Sequence[Sequence[Span]], rows: Sequence[int]) -> None:
    """Raise `ValueError` naming row, unit and value where an estimator gave what cannot be used."""
    if len(importances.values) != len(rows):
        raise ValueError(f"estimator: gave values for {len(importances.values)} rows, asked for {len(rows)}")
    for b, row, row_units in zip(rows, importances.values, units, strict=True):
        if row.shape != (len(row_units),):
            raise ValueError(f"estimator, row {b}: gave shape {tuple(row.shape)} for {len(row_units)} units")
        if (bad := (~torch.isfinite(row)).nonzero()).numel():
            raise ValueError(f"estimator, row {b}, unit {int(bad[0])}: must be finite, got {row[int(bad[0])].item()}")


def _checked_weights(weights: Tensor, b: int, length: int) -> Tensor:
    """What a caller's reshaping gave for row `b`; raises `ValueError` naming token and value."""
    if weights.shape != (length,):
        raise ValueError(f"reshape, row {b}: gave shape {tuple(weights.shape)} for {length} tokens")
    if (bad := (~(torch.isfinite(weights) & (weights >= 0))).nonzero()).numel():
        t = int(bad[0])
        raise ValueError(f"reshape, row {b}, token {t}: must be finite and not negative, got {weights[t].item()}")
    return weights


def _padded_logprobs(logprobs: Sequence[Tensor] | None, rows: Sequence[int], completion_ids: Tensor) -> Tensor | None:
    if logprobs is None:
        return None
    padded = torch.zeros(completion_ids.shape, dtype=torch.float32)
    for b, row in zip(rows, logprobs, strict=True):
        padded[b, : len(row)] = row
    return padded.to(completion_ids.device)


def _equal_prompts(prompts: Sequence[Tensor]) -> Tensor:
    """(B,) int64, the same for rows with the same prompt."""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(tuple(row.tolist()), len(numbers)) for row in prompts])


def _ids_that_say_nothing(tokenizer: Any) -> tuple[int, ...]:
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return tuple(token for token in ids if token is not None)


def _check_columns(completion_ids: Tensor, **columns: Tensor | Sequence[Tensor] | None) -> None:
    batch = len(completion_ids)
    for name, column in columns.items():
        if column is None:
            continue
        shape = (batch,) if name in ("groups", "rewards") else tuple(completion_ids.shape)
        if isinstance(column, Tensor) and name != "external":
            if tuple(column.shape) != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(column.shape)}")
        elif len(column) != batch:
            raise ValueError(f"{name} has {len(column)} rows, completion_ids has {batch}")


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
