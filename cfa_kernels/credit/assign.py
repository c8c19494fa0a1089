"""Credit: the whole way from padded batches of sampled tokens to the weight, or the advantage, of every token.

`counterfactual_credit` is what trainers call once per generation batch: answers and units of the completions that
matter, an estimator of their importance (`estimators.py`), a reshaping to weights (`reshaping.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..estimators.base import CreditBatch, Importances
from ..estimators.probes import Probe, length_without_eos, with_probes
from ..estimators.registry import as_numbers, masking
from ..hf.verify import FLOAT32_NOISE, noise_floor
from ..scoring.masked import CounterfactualScores, ScoringWork, query_logprobs, score_counterfactuals
from ..scoring.outcomes import DIVERGENCES, rounding
from ..span import Span
from ..text.find import Reasoning, find_reasoning
from .config import CounterfactualConfig
from .weights import (
    Reshape,
    bilevel_weights,
    identity_weights,
    normalized_weights,
    random_weights,
    range_weights,
    spread_over_tokens,
    top_threshold,
    top_weights,
)

_EQUAL = 1e-6
"""Importances under "range" that are not in nats count as equal where they lie no further apart."""


@dataclass(frozen=True)
class Credit:
    """Weights of a (B, T) batch and what they came from; unscored rows have no spans.

    Attributes:
        weights: (B, T) fp32, 1 on padding and on rows without credit.
        answers: B spans or None.
        spans: B lists of the units that were judged.
        drop: B tensors (K_b,) fp32 on the CPU, minus the importance of each unit; of masking, as the answer's
            log-prob changes, in nats; minus the total effects where those were asked for.
        base: (B,) fp32 on the CPU, log P(answer), nats; nan where it was not scored.
        logprobs: (B, T) fp32 log-probs of the completion tokens, 0 on padding, if asked for.
        work: what the estimator fed; None where it fed nothing.
        advantages: (B, T) fp32, what to train on in place of `advantages`, where the estimator's values are signed;
            else None.
        added: (B, T) fp32 on the host, what of those was added to the caller's; None where nothing was.
        noise: B tensors (K_b,) on the CPU, nats that each drop may be off by rounding; None for 0.
    """

    weights: Tensor
    answers: list[Span | None]
    spans: list[list[Span]]
    drop: list[Tensor]
    base: Tensor
    logprobs: Tensor | None
    work: ScoringWork | None
    advantages: Tensor | None = None
    added: Tensor | None = None
    noise: list[Tensor] | None = None

    def metrics(self, completion_mask: Tensor) -> dict[str, float]:
        """Figures to log; `completion_mask` is (B, T). Drops are in nats, negative for spans that matter.

        A drop counts as that of a distractor where it is above `noise`. Of signed credit the figures are those of what
        is added to the advantages, in place of weights and drops.
        """
        counted = completion_mask.bool()
        scored = [i for i, spans in enumerate(self.spans) if spans]
        found = {
            "credit/scored_fraction": len(scored) / max(len(self.spans), 1),
            "credit/spans_mean": sum(len(self.spans[i]) for i in scored) / max(len(scored), 1),
            "credit/tokens_fed": float(self.work.tokens_fed if self.work else 0),
            "credit/forwards": float(self.work.forwards if self.work else 0),
        }
        if self.added is not None:
            added = self.added[counted.cpu()]
            return found | {
                "credit/added_abs_mean": added.abs().mean().item() if len(added) else 0.0,
                "credit/added_fraction": (added != 0).float().mean().item() if len(added) else 0.0,
            }
        tokens = self.weights[counted].float()
        found["credit/weight_mean"] = tokens.mean().item() if len(tokens) else 1.0
        found["credit/weight_std"] = tokens.std(correction=0).item() if len(tokens) else 0.0
        if any(map(len, self.drop)):
            drops = torch.cat(self.drop)
            noise = torch.zeros(()) if self.noise is None else torch.cat(self.noise)
            found |= {
                "credit/drop_mean": drops.mean().item(),
                "credit/drop_min": drops.min().item(),
                "credit/distractor_fraction": (drops > noise).float().mean().item(),
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
    """(B, T) fp32 token weights of a padded batch: `counterfactual_credit(...).weights`.

    Raises also `ValueError` where credit is signed, for weights do not hold it.
    """
    credit = counterfactual_credit(
        model, tokenizer, prompt_ids, prompt_mask, completion_ids, completion_mask,
        advantages=advantages, config=config, generator=generator,
    )  # fmt: skip
    if credit.advantages is not None:
        raise ValueError("config: its estimator is signed; take the advantages that counterfactual_credit gives")
    return credit.weights


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
    ask: Callable[..., tuple[list[list[Tensor]], ScoringWork]] | None = None,
    groups: Tensor | None = None,
    rewards: Tensor | Sequence[float] | None = None,
    entropies: Tensor | None = None,
    external: Sequence[Tensor | Sequence[float]] | None = None,
    probes: Sequence[Probe | None] | None = None,
    targets: Sequence[Tensor | None] | None = None,
    noise: float | None = None,
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
        ask: called in place of `query_logprobs`, with its arguments, by estimators that read more than answers: that of
            a `PackedForward` which has fed the completions already.
        groups: (B,) int64, equal for completions that are compared with each other; default: equal prompts.
        rewards: (B,) float, or a list of B numbers, for estimators that compare the completions of a group.
        entropies: (B, T) of each sampled token's distribution, nats, for `entropy`.
        external: B tensors or lists with a number for each unit or each token of the completion, for `external`.
        probes: for each completion tokens that ask it for an answer, or None: they are put behind it, their target is
            scored in place of its own answer, and nothing is trained on them. Gives units to completions without one.
        targets: for each completion 1-D int64 tokens that are scored in the place of its own answer, or None: of a
            wrong completion, say, those of the right answer. Needs an answer whose place they take.
        noise: nats per answer token by which rounding moves the scores. Importances of a completion that lie no further
            apart count as equal, and a drop within it is no distractor's. Default: `noise_floor(model)`, or
            `FLOAT32_NOISE` where `score` scores in the model's place.

    Returns:
        `Credit`; `weights` and `advantages` on completion_ids' device.

    Raises:
        ValueError: shapes or masks that are not as described, an empty prompt; an estimator that lacks what it reads,
            or gives values of the wrong number or that are not finite; advantages that are not finite where signed
            values are added; names the row.
        Also whatever the estimator raises.
    """
    config = config or CounterfactualConfig()
    kind = config.kind
    prompts = _unpad("prompt", prompt_ids, prompt_mask, left=True)
    completions = _unpad("completion", completion_ids, completion_mask, left=False)
    batch = len(prompts)
    if len(completions) != batch:
        raise ValueError(f"completion_ids has {len(completions)} rows, prompt_ids has {batch}")
    _check_columns(
        completion_ids, groups=groups, rewards=rewards, entropies=entropies, external=external, probes=probes,
        targets=targets,
    )  # fmt: skip
    if rewards is not None:
        rewards = as_numbers(rewards, "rewards", f"{batch} completions")
    real = [b for b in range(batch) if len(completions[b])]
    credited = [b for b in _rows_with_advantage(advantages, completion_ids) if len(completions[b])]
    lengths = {b: len(completions[b]) for b in credited}
    if kind.signed and advantages is not None:
        _check_finite(advantages, lengths)
    probed = {b for b in credited if probes is not None and probes[b] is not None}
    found = _find_units(config, tokenizer, {b: completions[b].tolist() for b in credited}, probed)
    judged = [b for b in credited if found[b].spans]
    scorer = _Scorer(score or score_counterfactuals, temperature)
    silent = _ids_that_say_nothing(tokenizer)
    elsewhere = model is None  # a host's scorer asks it
    own = torch.clone if callable(config.estimator) else lambda tensor: tensor  # it may write to what it is given

    def laid_out(rows: Sequence[int]) -> CreditBatch:
        asked = [
            _scored_as(
                completions[b], found.get(b, Reasoning(None, 0, [])), probes[b] if probes and b in probed else None,
                targets[b] if targets else None, b, silent,
            )
            for b in rows
        ]  # fmt: skip
        return CreditBatch(
            prompts=[own(prompts[b]) for b in rows],
            completions=[own(completion) for completion, _ in asked],
            lengths=[len(completions[b]) for b in rows],
            units=[row.spans[:] for _, row in asked],
            answers=[row.answer if row.spans else None for _, row in asked],
            reasoning_ends=[row.end for _, row in asked],
            placeholder_id=_placeholder(config, tokenizer) if kind.needs_answer else None,
            token_budget=config.token_budget,
            generator=generator,
            groups=(_equal_prompts(prompts) if groups is None else groups.cpu())[list(rows)],
            rewards=None if rewards is None else rewards.detach().cpu()[list(rows)],
            correct_threshold=config.correct_threshold,
            ignored_ids=silent,
            advantages=None if advantages is None else advantages.detach().cpu()[list(rows)],
            entropies=None if entropies is None else [own(entropies[b, : len(completions[b])]) for b in rows],
            external=None if external is None else [external[b] for b in rows],
            score=scorer,
            ask=ask or query_logprobs,
            elsewhere=elsewhere,
        )

    importances, rows, answers = Importances([]), list[int](), list[Span | None]()
    if judged and (config.mode in ("counterfactual", "inverted") or kind.needs_siblings):
        # Where a probe lies behind a completion, its own log-probs take a forward of their own.
        scorer.wants_logprobs = logprobs and kind.run is masking and config.exact and not (probed or targets)
        rows = real if scorer.wants_logprobs or kind.needs_siblings else judged
        given = laid_out(rows)
        answers = given.answers[:]
        options = {name: getattr(config, name) for name in kind.options if getattr(config, name) is not None}
        importances = _checked(
            kind.run(model, given, **options), [found[b].spans if b in found else [] for b in rows], rows
        )
    if logprobs and real and scorer.logprobs is None:
        scorer.wants_logprobs = True
        scorer(
            model, [prompts[b] for b in real], [completions[b] for b in real], [[] for _ in real],
            [None for _ in real], placeholder_id=_placeholder(config, tokenizer), token_budget=config.token_budget,
        )  # fmt: skip
    values = dict(zip(rows, importances.values, strict=True))

    def noise_of_token() -> float:
        if noise is not None:
            return noise
        return FLOAT32_NOISE if elsewhere or score is not None else noise_floor(model)

    rounded = dict(zip(rows, _roundings(config, importances, answers, noise_of_token), strict=True))
    weights = torch.ones(completion_ids.shape, dtype=torch.float32)
    signed = added = None
    if importances.signed:
        added = _added(config, completion_ids.shape, values, found, generator)
        signed = _with_added(config, advantages, added, lengths)
    elif config.mode != "uniform":
        for b, row in _reshaped(config, values, found, lengths, rounded, generator).items():
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
        added=added,
        noise=[rounded[b].drops if b in rounded else torch.zeros(0) for b in range(batch)],
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


def _scored_as(
    completion: Tensor, found: Reasoning, probe: Probe | None, target: Tensor | None, b: int, eos_ids: Sequence[int]
) -> tuple[Tensor, Reasoning]:
    """A completion as it is scored: with its probe, or another answer in the place of its own."""
    if not found.spans or (probe is None and target is None):
        return completion, found
    if probe is not None and target is not None:
        raise ValueError(f"targets row {b}: has a probe too; give one of them")
    if probe is not None:
        try:
            (longer,), (answer,) = with_probes([completion], [None], [probe], eos_ids, spans=[found.spans])
        except ValueError as problem:
            raise ValueError(str(problem).replace("row 0", f"row {b}", 1)) from problem
        return longer, found._replace(answer=answer, end=len(longer) - len(probe.tokens))
    assert target is not None
    if found.answer is None:
        raise ValueError(f"targets row {b}: no answer was found whose place it could take; give a probe")
    if target.ndim != 1 or target.dtype != torch.int64 or not len(target):
        raise ValueError(
            f"targets row {b}: must be a 1-D int64 tensor of at least one token, got {target.dtype} of shape "
            f"{tuple(target.shape)}"
        )
    start = found.answer.start
    other = torch.cat([completion[:start], target.cpu()])
    return other, found._replace(answer=Span(start, start + len(target)))


def _find_units(
    config: CounterfactualConfig, tokenizer: Any, ids: Mapping[int, list[int]], probed: Collection[int]
) -> dict[int, Reasoning]:
    """Answer, end of the reasoning and units of completions by row number; no more than the mode and estimator need.

    Rows that are `probed` have units without an answer too.
    """
    if config.mode == "uniform":
        return {b: Reasoning(None, len(row), []) for b, row in ids.items()}
    kind = config.kind
    tokens = (config.units or kind.units) == "tokens"
    found = find_reasoning(
        ids, tokenizer, detector=None if tokens or _drawn_by_token(config) else config.detector,
        max_spans=config.max_spans, selection=config.selection, unanswered=not kind.needs_answer or bool(probed),
        answer_format=config.answer_format, answer_fallback=config.answer_fallback,
    )  # fmt: skip
    asks = {b for b, row in found.items() if row.answer or b in probed or not kind.needs_answer}
    if not tokens or _drawn_by_token(config):
        return {b: row if b in asks else row._replace(spans=[]) for b, row in found.items()}
    silent = _ids_that_say_nothing(tokenizer)
    judged = dict.fromkeys(found, 0)  # tokens of each row
    for b in asks:
        judged[b] = len(ids[b]) if not kind.needs_answer else min(found[b].end, length_without_eos(ids[b], silent))
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
    rounded: Mapping[int, "_Rounding"],
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
        spread = rounded[b].spread if b in rounded and config.mode != "random" else 0.0
        if how == "range" and config.mode == "random":
            line = random_weights(row.answer, lengths[b], generator=generator, **limits)
        elif how == "range":
            line = range_weights(*place, noise=spread or _EQUAL, inverted=inverted, **limits)
        elif how == "bilevel":
            line = bilevel_weights(
                *place, tau=config.tau, boost=config.boost, floor=config.floor, noise=spread, inverted=inverted
            )
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


def _check_finite(advantages: Tensor, lengths: Mapping[int, int]) -> None:
    """Raise `ValueError` naming row, token and value of an advantage that is not finite; padding is not looked at."""
    for b, length in lengths.items():
        row = advantages[b].reshape(-1)[:length]
        if (bad := (~torch.isfinite(row)).nonzero()).numel():
            token = f", token {int(bad[0])}" if advantages.ndim == 2 else ""
            raise ValueError(f"advantages row {b}{token}: must be finite, got {row[int(bad[0])].item()}")


class _Rounding(NamedTuple):
    """Nats that a completion's importances may be off by rounding."""

    drops: Tensor  # (K,) of each
    spread: float = 0.0  # of the largest less the smallest


def _roundings(
    config: CounterfactualConfig,
    importances: Importances,
    answers: Sequence[Span | None],
    noise_of_token: Callable[[], float],
) -> list[_Rounding]:
    """That of each row, where importances are differences of an answer's log-probs; 0 where they are not."""
    scores, mean = importances.scores, config.outcome == "mean_logprob"
    in_nats = scores is not None and config.outcome not in DIVERGENCES
    found = []
    for i, (values, answer) in enumerate(zip(importances.values, answers, strict=True)):
        if not len(values) or answer is None or not (in_nats or config.estimator == "prefix_gain"):
            found.append(_Rounding(torch.zeros(len(values))))
            continue
        tokens = answer.end - answer.start
        scale = tokens if mean else 1
        if in_nats and scores is not None:
            base = scores.base[i].float().cpu() * scale
            errors = rounding(torch.cat([base[None], base - values * scale]), tokens, noise_of_token()) / scale
        else:  # of a probability by the mean over the answer's tokens
            errors = torch.full((1 + len(values),), noise_of_token() / tokens**0.5)
        first, last = errors[1 + int(values.argmax())], errors[1 + int(values.argmin())]
        found.append(_Rounding(torch.hypot(errors[:1], errors[1:]), float(torch.hypot(first, last))))
    return found


def _added(
    config: CounterfactualConfig,
    shape: torch.Size,
    values: Mapping[int, Tensor],
    found: Mapping[int, Reasoning],
    generator: torch.Generator | None,
) -> Tensor:
    """(B, T) fp32 signed values of each unit, for its tokens; 0 on others."""
    added = torch.zeros(shape)
    for b, row in found.items():
        line = values[b]
        if config.mode == "inverted":
            line = -line
        elif config.mode == "random":
            line = line[torch.randperm(len(line), generator=generator)]
        tokens = spread_over_tokens(line, row.spans, shape[1])
        added[b] = torch.where(tokens.isnan(), 0.0, tokens)
    return added


def _with_added(
    config: CounterfactualConfig, advantages: Tensor | None, added: Tensor, lengths: Mapping[int, int]
) -> Tensor:
    """(B, T) fp32 advantages with `added`; raises `ValueError` naming row and value where one is not finite."""
    if advantages is None:
        raise ValueError(f"advantages must be given: estimator={config.estimator!r} adds to them, got None")
    own = advantages.detach().float()
    _check_finite(own, lengths)
    return (own[:, None] if own.ndim == 1 else own) + added.to(own.device)


def _checked(given: Any, units: Sequence[Sequence[Span]], rows: Sequence[int]) -> Importances:
    """What an estimator gave, or a caller's rows of numbers; raises `ValueError` naming row, unit and value."""
    found = given if isinstance(given, Importances) else Importances(given)
    if not isinstance(found.values, list | tuple):
        raise ValueError(
            "estimator: must return Importances, or a list with a row of numbers for each of "
            f"{len(rows)} completions, got {type(found.values).__name__}"
        )
    if len(found.values) != len(rows):
        raise ValueError(f"estimator: gave values for {len(found.values)} rows, asked for {len(rows)}")
    values = []
    for b, row, row_units in zip(rows, found.values, units, strict=True):
        numbers = as_numbers(row, f"estimator, row {b}", f"{len(row_units)} units")
        if numbers.shape != (len(row_units),):
            raise ValueError(f"estimator, row {b}: gave shape {tuple(numbers.shape)} for {len(row_units)} units")
        if (bad := (~torch.isfinite(numbers)).nonzero()).numel():
            k = int(bad[0])
            raise ValueError(f"estimator, row {b}, unit {k}: must be finite, got {numbers[k].item()}")
        values.append(numbers)
    return replace(found, values=values)


def _checked_weights(given: Any, b: int, length: int) -> Tensor:
    """What a caller's reshaping gave for row `b`; raises `ValueError` naming token and value."""
    weights = as_numbers(given, f"reshape, row {b}", f"{length} tokens")
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


def _check_columns(completion_ids: Tensor, **columns: Tensor | Sequence[Any] | None) -> None:
    batch = len(completion_ids)
    for name, column in columns.items():
        if column is None:
            continue
        shape = (batch,) if name in ("groups", "rewards") else tuple(completion_ids.shape)
        if isinstance(column, Tensor) and name not in ("external", "probes", "targets"):
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
