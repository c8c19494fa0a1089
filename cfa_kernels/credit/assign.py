"""Credit padded batches of sampled tokens: find answers and units, judge the units, weigh every token.

Trainers call `counterfactual_credit` once per generation batch. It finds answers and units of the completions that
matter (`units.py`), their importance by an estimator (`estimators/`), and token weights by a rule (`weights.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from ..estimators.base import ANSWER, Importances
from ..hf.ranks import Ranks, inside
from ..options import as_numbers
from ..scoring.access import CAPABILITIES, ModelAccess, Sharded, TrainingForward, as_access
from ..scoring.batch import ScoredBatch
from ..scoring.masked import ScoringWork
from ..scoring.outcomes import rounding
from ..span import Span
from ..text.find import Reasoning
from .config import CounterfactualConfig, as_config
from .units import Known, PaddedBatch, equal_prompts, find_units, placeholder_of, scored_as, special_ids
from .weights import Judged, drawn, normalized_weights, spread_over_tokens

FIGURES: dict[str, str] = {
    "credit/weight_mean": "mean",
    "credit/weight_std": "mean",
    "credit/scored_fraction": "mean",
    "credit/spans_mean": "mean",
    "credit/drop_mean": "mean",
    "credit/drop_min": "min",
    "credit/distractor_fraction": "mean",
    "credit/tokens_fed": "sum",
    "credit/forwards": "sum",
    "credit/added_abs_mean": "mean",
    "credit/added_fraction": "mean",
}
"""Every name that `Credit.metrics` may give, and how those of several processes combine: mean, sum, min or max."""


@dataclass(frozen=True)
class Credit:
    """Weights of a (B, T) batch and their origin; completions that were not judged have no spans.

    Attributes:
        weights: (B, T) fp32, 1 on padding and on completions without credit.
        answers: B spans, None where no answer was found.
        spans: B lists of the units that were judged.
        drop: B tensors (K_b,) fp32 on the CPU, minus the importance of each unit; under masking the change of
            the answer's log-prob, in nats, or minus the total effect where that was configured.
        base: (B,) fp32 on the CPU, log P(answer), nats; nan where it was not scored.
        work: counts of what the estimator fed; None where it fed nothing.
        advantages: (B, T) fp32, to train on instead of the caller's, where the estimator's values are signed; else
            None.
        added: (B, T) fp32 on the host, the part of those that was added to the caller's; None where nothing was.
        noise: B tensors (K_b,) on the CPU, nats by which rounding may move each drop; None for 0.
    """

    weights: Tensor
    answers: list[Span | None]
    spans: list[list[Span]]
    drop: list[Tensor]
    base: Tensor
    work: ScoringWork | None
    advantages: Tensor | None = None
    added: Tensor | None = None
    noise: list[Tensor] | None = None

    @staticmethod
    def of_parts(shape: torch.Size, parts: Sequence[tuple[Sequence[int], "Credit"]]) -> "Credit":
        """Join the credit of parts of a batch, each given with the numbers of its rows.

        Args:
            shape: (B, T) of the batch.
            parts: rows and their credit, over T tokens; rows in no part get weight 1 and count as not scored.
        """
        signed = any(credit.advantages is not None for _, credit in parts)
        work = [credit.work for _, credit in parts if credit.work is not None]
        nothing = torch.zeros(0)
        whole = Credit(
            weights=torch.ones(shape),
            answers=[None] * shape[0],
            spans=[[] for _ in range(shape[0])],
            drop=[nothing] * shape[0],
            base=torch.full((shape[0],), float("nan")),
            work=sum(work, ScoringWork()) if work else None,
            advantages=torch.zeros(shape) if signed else None,
            added=torch.zeros(shape) if signed else None,
            noise=[nothing] * shape[0],
        )
        for rows, credit in parts:
            for name in ("weights", "base", "advantages", "added"):
                if (values := getattr(credit, name)) is not None:
                    getattr(whole, name)[list(rows)] = values
            noise = [torch.zeros(len(row)) for row in credit.drop] if credit.noise is None else credit.noise
            lists = zip(rows, credit.answers, credit.spans, credit.drop, noise, strict=True)
            for b, answer, spans, drop, own in lists:
                whole.answers[b], whole.spans[b], whole.drop[b] = answer, spans, drop
                whole.noise[b] = own  # type: ignore[index]
        return whole

    def metrics(self, completion_mask: Tensor) -> dict[str, float]:
        """Compute figures to log; `completion_mask` is (B, T). Drops are in nats, negative for spans that matter.

        A drop above `noise` counts as a distractor's. For signed credit the figures describe what is added to the
        advantages, instead of weights and drops.
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
    """Weigh the tokens of a padded batch, (B, T) fp32: `counterfactual_credit(...).weights`.

    Also raises `ValueError` if credit is signed, which weights cannot express.
    """
    credit = counterfactual_credit(
        model, tokenizer, prompt_ids, prompt_mask, completion_ids, completion_mask,
        advantages=advantages, config=config, generator=generator,
    )  # fmt: skip
    if credit.advantages is not None:
        raise ValueError("config: its estimator is signed; use counterfactual_credit and train on its advantages")
    return credit.weights


def counterfactual_credit(
    model: nn.Module | ModelAccess,
    tokenizer: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    advantages: Tensor | None = None,
    config: CounterfactualConfig | None = None,
    generator: torch.Generator | None = None,
    noise: float | None = None,
    **known: Unpack[Known],
) -> Credit:
    """Find answers and units, judge them, and weigh every token of a batch laid out as TRL does.

    Args:
        model: as in `score_counterfactuals`, or another `ModelAccess`: `TrainingForward`, `LogprobService`. Estimators
            that only compare completions do not use it.
        tokenizer: the one that sampled the ids.
        prompt_ids, prompt_mask: (B, P), left-padded; the mask is 1 on real tokens.
        completion_ids, completion_mask: (B, T), right-padded. A fully masked row (a truncated completion, for
            example) gets no credit.
        advantages: (B,) or (B, T). Completions where they are all zero contribute nothing to the loss, so they
            are not judged and get weight 1. Required where the estimator's values are signed.
        config: default `CounterfactualConfig()`.
        generator: random source of the control `random` and of the estimator, on the CPU.
        noise: nats per answer token by which rounding moves the scores. Importances of a completion that are no further
            apart count as equal, and a drop within it is not a distractor's. By default that of `model`, measured once.
        **known: further columns about the completions, see `Known`: `groups` (B,), `rewards` (B,), `entropies` (B, T),
            `external`, `probes`, `targets` (B tensors or None each).

    Returns:
        `Credit`; `weights` and `advantages` on completion_ids' device.

    Raises:
        ValueError: shapes or masks that are not as described, an empty prompt; an estimator that lacks what it reads,
            or gives values of the wrong number or that are not finite; advantages that are not finite where signed
            values are added; names the row.
        TypeError: `config` is another thing than a configuration.
        NotImplementedError: an estimator needs what this access to the model does not offer.
        Also what the estimator itself raises.
    """
    config, access = as_config(config), as_access(model)

    def assign() -> Credit:
        given = PaddedBatch.of(prompt_ids, prompt_mask, completion_ids, completion_mask, advantages, known)
        found = find_units(config, tokenizer, given)
        judged = _judge(config, access, tokenizer, given, found, generator, noise)
        weights, added = _weigh(config, given, found, judged, generator)
        return _credit(config, given, found, judged, weights, added)

    return access.run(assign) if config.asks_model else assign()


@dataclass(frozen=True)
class _Judged:
    """Importances, by a completion's number in the padded batch."""

    values: dict[int, Tensor]  # (K,) importances
    roundings: dict[int, "_Rounding"]
    importances: Importances  # in the batch's order
    numbers: list[int]


class _Rounding(NamedTuple):
    """Rounding of a completion's importances, nats."""

    drops: Tensor  # (K,) of each importance
    spread: float = 0.0  # of the difference of the largest and the smallest


def _judge(
    config: CounterfactualConfig,
    access: ModelAccess,
    tokenizer: Any,
    given: PaddedBatch,
    found: Mapping[int, Reasoning],
    generator: torch.Generator | None,
    noise: float | None,
) -> _Judged:
    """Run the estimator on the units that were found."""
    nothing = not config.runs_estimator or not any(found[b].spans for b in given.credited)
    continued = isinstance(access, TrainingForward) and isinstance(inside(access.model), Ranks)
    shared = isinstance(access, Sharded) or continued
    if noise is None and config.runs_estimator and shared:  # also one that judges nothing
        noise = access.noise
    if nothing:
        return _Judged({}, {}, Importances([]), [])
    if missing := sorted(config.estimator.needs & set(CAPABILITIES) - access.capabilities):
        raise NotImplementedError(
            f"{config.asked_for}: it needs {CAPABILITIES[missing[0]]}, and the model is asked through "
            f"{type(access).__name__}"
        )
    if config.weights is None and given.advantages is not None:  # its values are scaled by them and added to them
        _check_finite(given.advantages, {b: len(given.completions[b]) for b in given.credited})
    if config.compares:
        rows = [b for b, completion in enumerate(given.completions) if len(completion)]
    else:
        rows = [b for b in given.credited if found[b].spans]
    batch = _scored_batch(config, access, tokenizer, given, found, rows, generator)
    units, answers = [found[b].spans if b in found else [] for b in batch.numbers], batch.answers
    asks = config.needs & set(CAPABILITIES)
    judged = access.judge(config.estimator, batch) if asks else config.estimator(access, batch)
    importances = _checked(judged, units, batch.numbers)
    noise_of_token = cache(lambda: access.noise if noise is None else noise)  # one look at the model for all rows
    roundings = _roundings(importances, answers, noise_of_token)
    by_row = dict(zip(batch.numbers, importances.values, strict=True))
    return _Judged(by_row, dict(zip(batch.numbers, roundings, strict=True)), importances, batch.numbers)


def _roundings(
    importances: Importances, answers: Sequence[Span | None], noise_of_token: Callable[[], float]
) -> list[_Rounding]:
    """Bound the rounding of importances that are changes of an answer's log-prob or probability; 0 for others."""
    found = []
    for i, (values, answer) in enumerate(zip(importances.values, answers, strict=True)):
        if not len(values) or answer is None or importances.change_of is None:
            found.append(_Rounding(torch.zeros(len(values))))
            continue
        tokens = answer.end - answer.start
        scale = tokens if importances.change_of == "mean_logprob" else 1
        if importances.base is not None:
            base = importances.base[i].float().cpu() * scale
            errors = rounding(torch.cat([base[None], base - values * scale]), tokens, noise_of_token()) / scale
        else:  # of a probability by the mean over the answer's tokens
            errors = torch.full((1 + len(values),), noise_of_token() / tokens**0.5)
        first, last = errors[1 + int(values.argmax())], errors[1 + int(values.argmin())]
        found.append(_Rounding(torch.hypot(errors[:1], errors[1:]), float(torch.hypot(first, last))))
    return found


def _scored_batch(
    config: CounterfactualConfig,
    access: ModelAccess,
    tokenizer: Any,
    given: PaddedBatch,
    found: Mapping[int, Reasoning],
    rows: Sequence[int],
    generator: torch.Generator | None,
) -> ScoredBatch:
    """Build the estimator's batch of the completions `rows`, in packing order."""
    special, probed, known = special_ids(tokenizer), given.probed, given.known
    asked = {
        b: scored_as(
            given.completions[b], found.get(b, Reasoning(None, 0, [])), (known.get("probes") or {b: None})[b]
            if b in probed else None, (known.get("targets") or {b: None})[b], b, special,
        )
        for b in rows
    }  # fmt: skip
    batch = ScoredBatch.of(
        access.model if access.module is not None and config.needs & set(CAPABILITIES) else None,
        [given.prompts[b] for b in rows],
        [asked[b][0] for b in rows],
        [asked[b][1].spans for b in rows],
        [asked[b][1].answer if asked[b][1].spans else None for b in rows],
        placeholder_id=placeholder_of(config, tokenizer) if ANSWER in config.estimator.needs else None,
        token_budget=config.token_budget,
        numbers=rows,
        apart=ANSWER in config.estimator.needs,
    )
    order = batch.numbers
    groups = known.get("groups")
    rewards, entropies, external = known.get("rewards"), known.get("entropies"), known.get("external")
    return replace(
        batch,
        lengths=[len(given.completions[b]) for b in batch.numbers],
        reasoning_ends=[asked[b][1].end for b in batch.numbers],
        generator=generator,
        groups=(equal_prompts(given.prompts) if groups is None else groups.cpu())[order],
        rewards=None if rewards is None else rewards[order],  # type: ignore[call-overload]
        advantages=None if given.advantages is None else given.advantages.detach().cpu()[order],
        entropies=None
        if entropies is None
        else [entropies[b, : len(given.completions[b])].clone() for b in batch.numbers],
        external=None if external is None else [external[b] for b in batch.numbers],
        special_ids=special,
    )


def _weigh(
    config: CounterfactualConfig,
    given: PaddedBatch,
    found: Mapping[int, Reasoning],
    judged: _Judged,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """Make the weights (B, T) and, for signed importances, what they add to the advantages (B, T)."""
    weights, signed = torch.ones(given.padded.shape, dtype=torch.float32), judged.importances.signed
    rule = None if signed else config.weights
    if config.control == "off" or (rule is None and not signed):
        return weights, None
    values, spreads = judged.values, {b: one.spread for b, one in judged.roundings.items()}
    rows = {
        b: Judged(
            values.get(b, torch.zeros(0)),
            row.spans if b in values or config.control == "random" else [],
            row.answer,
            len(given.completions[b]),
            spreads.get(b, 0.0),
        )
        for b, row in found.items()
    }
    if config.control == "random":
        rows = {b: drawn(row, rule, generator) for b, row in rows.items()}
    inverted = config.control == "inverted"
    if rule is None:
        return weights, _added(rows, weights.shape, inverted=inverted)
    for (b, row), line in zip(rows.items(), rule(list(rows.values()), inverted=inverted), strict=True):
        weights[b, : row.length] = normalized_weights(line, config.normalize) if line.any() else line
    return weights, None


def _added(rows: Mapping[int, Judged], shape: torch.Size, *, inverted: bool) -> Tensor:
    """Spread signed values over the tokens of their units, (B, T) fp32; 0 on other tokens."""
    added = torch.zeros(shape)
    for b, row in rows.items():
        values = -row.importances if inverted else row.importances
        tokens = spread_over_tokens(values, row.units, row.length)
        added[b, : row.length] = torch.where(tokens.isnan(), 0.0, tokens)
    return added


def _credit(
    config: CounterfactualConfig,
    given: PaddedBatch,
    found: Mapping[int, Reasoning],
    judged: _Judged,
    weights: Tensor,
    added: Tensor | None,
) -> Credit:
    """Collect the results in the order of the padded batch."""
    rows, none = range(len(given.prompts)), torch.zeros(0)
    base = torch.full((len(given.prompts),), float("nan"))
    if judged.importances.base is not None:
        base[judged.numbers] = judged.importances.base.float().cpu()
    signed = None
    if added is not None:
        if given.advantages is None:
            raise ValueError(f"advantages must be given: estimator={config.estimator.name!r} adds to them, got None")
        own = given.advantages.detach().float()
        _check_finite(own, {b: len(given.completions[b]) for b in given.credited})
        signed = (own[:, None] if own.ndim == 1 else own) + added.to(own.device)
    return Credit(
        weights=weights.to(given.padded.device),
        answers=[found[b].answer if b in found else None for b in rows],
        spans=[found[b].spans if b in found else [] for b in rows],
        drop=[-judged.values[b] if b in judged.values else none for b in rows],
        base=base,
        work=judged.importances.work,
        advantages=signed,
        added=added,
        noise=[judged.roundings[b].drops if b in judged.roundings else none for b in rows],
    )


def _check_finite(advantages: Tensor, lengths: Mapping[int, int]) -> None:
    """Raise `ValueError` naming row, token and value of an advantage that is not finite; padding is not checked."""
    for b, length in lengths.items():
        row = advantages[b].reshape(-1)[:length]
        if (bad := (~torch.isfinite(row)).nonzero()).numel():
            token = f", token {int(bad[0])}" if advantages.ndim == 2 else ""
            raise ValueError(f"advantages row {b}{token}: must be finite, got {row[int(bad[0])].item()}")


def _checked(given: Any, units: Sequence[Sequence[Span]], rows: Sequence[int]) -> Importances:
    """Check what an estimator returned; raises `ValueError` naming row, unit and value."""
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
