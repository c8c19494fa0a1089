"""cfa_kernels/estimators/base.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..scoring.masked import CounterfactualScores, ScoringWork, query_logprobs, score_counterfactuals
from ..span import Span


@dataclass(frozen=True)
class CreditBatch:
    """B completions, unpadded, and what is known of them. What an estimator does not read may be None.

    Attributes:
        prompts: B 1-D int64 tensors on the host.
        completions: B 1-D int64 tensors on the host, as scored: the sampled tokens and, where the answer is asked for
            by a probe or is another than the sampled one, what was put behind the reasoning.
        lengths: B ints, sampled tokens; units lie inside these.
        units: B lists of K_b spans of tokens, each judged as one.
        answers: B spans of `completions`, or None.
        reasoning_ends: B ints, where the answer's marker begins; the length where there is no answer.
        placeholder_id: the id that stands for a masked token; None for estimators that mask nothing.
        token_budget: most tokens per forward; None by free memory.
        generator: source of what is drawn, on the CPU; None for torch's own.
        groups: (B,) int64, equal for the completions of one prompt.
        rewards: (B,) float.
        correct_threshold: a completion with at least this reward counts as correct.
        ignored_ids: tokens that say nothing of a completion: those that end a text and fill a batch.
        advantages: (B,) or (B, T) float.
        entropies: B tensors (T_b,) of each sampled token's distribution, nats.
        external: B tensors (K_b,) or (T_b,), or lists, the caller's own importances.
        score: stands in for `score_counterfactuals`, with its arguments.
        ask: stands in for `query_logprobs`, with its arguments.
        elsewhere: the model lies in other processes, and `score` alone can ask it.
    """

    prompts: list[Tensor]
    completions: list[Tensor]
    lengths: list[int]
    units: list[list[Span]]
    answers: list[Span | None]
    reasoning_ends: list[int]
    placeholder_id: int | None
    token_budget: int | None = None
    generator: torch.Generator | None = None
    groups: Tensor | None = None
    rewards: Tensor | None = None
    correct_threshold: float = 0.5
    ignored_ids: tuple[int, ...] = ()
    advantages: Tensor | None = None
    entropies: list[Tensor] | None = None
    external: list[Tensor | Sequence[float]] | None = None
    score: Callable[..., CounterfactualScores] = field(default=score_counterfactuals)
    ask: Callable[..., tuple[list[list[Tensor]], ScoringWork]] = field(default=query_logprobs)
    elsewhere: bool = False

    @property
    def sampled(self) -> list[Tensor]:
        """B 1-D int64 tensors: the completions as they were sampled."""
        return [row[:length] for row, length in zip(self.completions, self.lengths, strict=True)]


@dataclass(frozen=True)
class Importances:
    """What an estimator found.

    Attributes:
        values: B tensors (K_b,) fp32 on the host, one per unit, high where the unit matters.
        signed: the values are added to the advantages of their units' tokens, instead of being reshaped to weights.
        work: what was fed for them; None for nothing.
        scores: what masking gave, if it was that; of total effects the direct ones.
    """

    values: list[Tensor]
    signed: bool = False
    work: ScoringWork | None = None
    scores: CounterfactualScores | None = None


Estimator = Callable[[nn.Module, CreditBatch], Importances]


class EstimatorKind(NamedTuple):
    """How an estimator by name is called."""

    run: Callable[..., Importances]  # (model, batch, **options)
    units: str  # what it judges unless told otherwise: "spans" or "tokens"
    reshape: str  # how its importances become weights unless told otherwise
    needs_answer: bool  # judges reasoning alone, in rows with an answer
    needs_siblings: bool  # looks at every completion of a group, whatever its advantage
    needs_model: bool  # runs the model, or asks for its log-probs
    options: tuple[str, ...] = ()  # fields of the configuration that it takes
    signed: bool = False  # its values are added to advantages; a function says so with what it gives
