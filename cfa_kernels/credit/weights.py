"""Turn importances of units into weights of tokens in the loss, by the rules of the source papers.

The controls `inverted`, `permuted` and `random` act in between, so every estimator has them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops.row_softmax import FLOAT32_NOISE
from ..ops.upload import upload
from ..options import NotNegative, Share, as_numbers, check_class, check_fields
from ..rows import check_finite, check_floating
from ..span import Span, span_inside

Control = Literal["inverted", "permuted", "random", "off"]
_EQUAL = 1e-6  # difference up to which importances under "range" count as equal

Gather = Callable[[Any], list[Any]]
"""Function that returns its argument of each process, by rank; all processes call it equally often."""

Reshape = Callable[[Tensor, Sequence[Span], Span | None, int], Tensor]
"""Function from importances (K,), their K units, the answer and the completion's length to weights (length,) fp32."""


def span_weights(
    drop: Tensor | Sequence[float],
    spans: Sequence[Span],
    answer: Span | None,
    length: int,
    *,
    rule: "WeightRule | None" = None,
    inverted: bool = False,
) -> Tensor:
    """Weigh the tokens of one completion, (length,) fp32, by the drops of its spans (CF paper, eqs. 4, 6 and 7).

    One span, or drops that differ by the rounding of float32 only, weigh 1, as do tokens outside every span. A token in
    several spans takes the largest importance among them. `rule` is by default `Range(min_spread=0.0)`, the paper's.

    `drop` are (K,) base minus masked log-prob of the answer, nats, one per span. Raises `ValueError` naming the
    argument for spans outside the completion and drops that are not finite.
    """
    values = as_numbers(drop, "drop", f"{len(spans)} spans")
    if len(values) != len(spans):
        raise ValueError(f"drop must hold one value per span: got shape {tuple(values.shape)} for {len(spans)} spans")
    for where, span in (*((f"spans, span {k}", span) for k, span in enumerate(spans)), ("answer", answer)):
        if span is not None:
            span_inside(where, span, length)
    for k in (~values.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"drop, span {k}: must be finite, got {values[k].item()}")
    if len(values) and values.max() - values.min() <= FLOAT32_NOISE:
        values = torch.zeros(len(values))
    row = WeightInputs(values, spans, answer, length)
    (weights,) = (rule or Range(min_spread=0.0))([row], inverted=inverted)
    return weights.to(getattr(drop, "device", "cpu"))


def side_by_side(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join the importances of B rows, at least one, to (N,); return also its row's least, largest and mean for each."""
    values = torch.cat([*rows])
    (lengths,) = upload([np.array([*map(len, rows)])], values.device)
    reduced = (torch.segment_reduce(values, kind, lengths=lengths, unsafe=True) for kind in ("min", "max", "mean"))
    low, high, mean = (one.repeat_interleave(lengths, output_size=len(values)) for one in reduced)
    return values, low, high, mean


def spread_over_tokens(
    values: Sequence[Tensor], rows: Sequence["WeightInputs"], outside: float = math.nan, kind: str = "max"
) -> list[Tensor]:
    """Give each token of B rows the largest, or `kind="min"`, of its units' values, and `outside` to one of no unit.

    `values` hold one for each unit, split in any way. Returns (T_b,) fp32 each, where they are, without a wait.
    """
    if not rows:
        return []
    flat = torch.cat([*values]).float()
    lengths = [row.length for row in rows]
    offsets = np.repeat(np.cumsum([0, *lengths[:-1]]), [len(row.units) for row in rows])
    edges = np.fromiter(chain.from_iterable(chain.from_iterable(row.units for row in rows)), np.int64)
    starts, sizes = edges[::2] + offsets, edges[1::2] - edges[::2]
    unit_of = np.repeat(np.arange(len(sizes)), sizes)
    token = np.arange(len(unit_of)) + (starts - (np.cumsum(sizes) - sizes))[unit_of]
    arrays = [unit_of[np.argsort(token, kind="stable")], np.bincount(token, minlength=sum(lengths))]
    owners, counts = upload(arrays, flat.device)
    tokens = torch.segment_reduce(flat.index_select(0, owners), kind, lengths=counts, unsafe=True)
    return [*tokens.masked_fill(counts == 0, outside).split(lengths)]


def opened(units: Sequence[Span]) -> list[Span]:
    """Omit each unit's first token; a unit of a single token stays."""
    return [Span(min(unit.start + 1, unit.end - 1), unit.end) for unit in units]


def unit_weight(weights: Tensor, unit: Span) -> float:
    """Return the weight of a unit, by the weights (T,) of its completion: its last token's, as `opened` keeps that."""
    return weights[unit.end - 1].item()


def normalized_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Rescale weights to mean 1 over the tokens of `mask`, unless all are 0 there."""
    mean = weights.masked_fill(~mask, 0).sum() / mask.sum()
    return torch.where(mask & (mean > 0), weights / mean, weights)


def fold_weights(advantages: Tensor, weights: Tensor) -> Tensor:
    """Multiply advantages, (B,) or (B, T), by token weights (B, T): as weighing each token's clipped loss, KL aside.

    Returns (B, T) in advantages' dtype, or `advantages` itself if every weight is 1. Raises `ValueError` for other
    shapes, for advantages that are not floating point, and for weights that are not finite or below 0.
    """
    check_class(Tensor, advantages=advantages, weights=weights)
    if weights.dim() != 2 or advantages.shape not in (weights.shape, weights.shape[:1]):
        shapes = f"got {tuple(advantages.shape)} and {tuple(weights.shape)}"
        raise ValueError(f"advantages must be (B,) or (B, T) for weights (B, T), {shapes}")
    check_floating("advantages", advantages)
    check_finite("weights", range(len(weights)), list(weights), low=0.0)
    if (weights == 1).all():
        return advantages
    return (advantages if advantages.dim() == 2 else advantages[:, None]) * weights.to(advantages)


class WeightInputs(NamedTuple):
    """One completion with the importances of its units, or with draws in their place."""

    importances: Tensor  # (K,) fp32, high where the unit matters
    units: Sequence[Span]
    answer: Span | None
    length: int
    are_weights: bool = False  # the importances are a weight for each token, (length,)
    min_spread: float = 0.0  # `Range.min_spread` for them, if it is None
    advantage: float = 1.0  # of the completion, which signed rules share out
    group: int = 0  # equal for completions that are compared with each other


class WeightRule:
    """Rule by which importances become weights: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]  # what configurations call it
    compares: ClassVar[bool] = False  # whether the weights of a completion depend on the others of the batch
    signed: ClassVar[bool] = False  # whether it gives additions to the advantages, of any sign, instead of weights
    absolute: ClassVar[bool] = False  # whether it reads drops: of one sign whatever the advantage, 0 within rounding
    by_group: ClassVar[bool] = False  # whether it compares completions of a group, so that a host needs whole groups
    token_draws: ClassVar[tuple[float, float] | None] = None  # limits of each token's draw; None where units draw
    on_device: ClassVar[bool] = False  # whether it weighs importances where they are, without a wait

    def __call__(self, rows: Sequence[WeightInputs], *, inverted: bool, gather: Gather | None = None) -> list[Tensor]:
        """Weigh the tokens of every completion of a batch, (T_b,) fp32 each; `gather` finds the rest of the batch.

        By default a token takes the largest value among its units, by `weigh`; of no unit it weighs 1, or adds 0.
        """
        values = [self.weigh(row, inverted=inverted) for row in rows]
        return spread_over_tokens(values, rows, outside=0.0 if self.signed else 1.0)

    def weigh(self, row: WeightInputs, *, inverted: bool) -> Tensor:
        """Weigh the units of one completion, (K,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(WeightRule):
    """Rule that maps min-max normalised importances to a range of weights (CF paper, eqs. 6 and 7)."""

    name = "range"
    on_device = True

    w_min: NotNegative = 0.5
    """Weight of the least important span of a completion."""
    w_max: NotNegative = 4.0
    """Weight of its most important span."""
    w_answer: NotNegative = 1.5
    """Weight of the answer's tokens."""
    min_spread: NotNegative | None = None
    """Least difference between the largest and the smallest importance for the whole range; below it, weights come
    nearer to 1 in proportion. None takes it for changes of an answer's log-prob (nats) or probability: `0.1`, or
    what rounding may explain if that is more; for other importances, and in the CF paper, it is 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.w_min > self.w_max:
            raise ValueError(f"w_min must not exceed w_max, got {self.w_min} and {self.w_max}")

    @property
    def token_draws(self) -> tuple[float, float]:  # type: ignore[override]
        """Limits of the weight that a token draws: the CF paper's control."""
        return self.w_min, self.w_max

    def __call__(self, rows: Sequence[WeightInputs], *, inverted: bool, gather: Gather | None = None) -> list[Tensor]:
        """Weigh the tokens of every completion."""
        drawn = [row.importances.clone() for row in rows if row.are_weights]
        lines = drawn or (self._by_units(rows, inverted) if rows else [])
        for row, line in zip(rows, lines, strict=True):
            if row.answer is not None:
                line[slice(*row.answer)].fill_(self.w_answer)
        return lines

    def _by_units(self, rows: Sequence[WeightInputs], inverted: bool) -> list[Tensor]:
        values, low, high, _ = side_by_side([row.importances for row in rows])
        given = [row.min_spread if self.min_spread is None else self.min_spread for row in rows]
        sizes = [len(row.importances) for row in rows]
        (least,) = upload([np.repeat(np.array(given, np.float32), sizes)], values.device)
        spread = high - low
        share = (values - low) / spread
        weights = self.w_min + (1 - share if inverted else share) * (self.w_max - self.w_min)
        nearer = spread / least  # without a least spread inf, or nan
        weights = torch.where(nearer < 1, 1 + (weights - 1) * nearer, weights)
        weights = weights.masked_fill(~(spread > _EQUAL), 1)
        return spread_over_tokens([weights], rows, outside=1.0, kind="min" if inverted else "max")


@dataclass(frozen=True)
class Bilevel(WeightRule):
    """Rule that suppresses weights below a quantile of importances and boosts those above (OAR paper, eqs. 14-17).

    Per token of the units: importance I below 0 counts as 0; I^ = log(1 + I), min-max normalised; with tau* the
    tau-quantile of I^, omega = I^ / tau* below it and 1 + boost (I^ - tau*) / (1 - tau*) from it on, rescaled to mean 1
    over those tokens; others weigh 1. The authors' code has a floor of 0.1.
    """

    name = "bilevel"

    tau: Share = 0.4
    """Quantile of a completion's importances below which weights are suppressed."""
    boost: NotNegative = 2.0
    """Additional weight of the most important token over one at the threshold, before the rescaling."""
    floor: Share = 0.0
    """Least weight, before the rescaling."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rows: Sequence[WeightInputs], *, inverted: bool, gather: Gather | None = None) -> list[Tensor]:
        """Weigh the tokens of every completion."""
        spread = spread_over_tokens([row.importances.clamp(min=0).log1p() for row in rows], rows)
        return [self._of_tokens(tokens, inverted) for tokens in spread]

    def _of_tokens(self, tokens: Tensor, inverted: bool) -> Tensor:
        weights, covered = torch.ones(len(tokens)), ~tokens.isnan()
        values = tokens[covered].double()
        if not len(values) or (spread := values.max() - values.min()) <= torch.finfo(torch.float32).tiny:
            return weights
        share = (values - values.min()) / spread
        share = 1 - share if inverted else share
        threshold = torch.quantile(share, self.tau)
        below = share / threshold if threshold > 0 else share  # with a threshold of 0 nothing is below it
        above = 1 + (self.boost * (share - threshold) / (1 - threshold) if threshold < 1 else torch.zeros_like(share))
        omega = torch.where(share < threshold, below, above).clamp(min=self.floor)
        weights[covered] = (omega * (len(omega) / omega.sum())).float()
        return weights


@dataclass(frozen=True)
class TopShare(WeightRule):
    """Rule of weight 1 for the most important share of a batch's tokens, else 0 ("80/20", arXiv 2506.01939)."""

    name = "top"
    compares = True

    fraction: Share = 0.2
    """Share of the tokens of the batch that keep their weight."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rows: Sequence[WeightInputs], *, inverted: bool, gather: Gather | None = None) -> list[Tensor]:
        """Weigh all completions, those of other processes too, by one threshold, as TRL's `top_entropy_quantile`."""
        spread = spread_over_tokens([row.importances for row in rows], rows)
        tokens = torch.cat([torch.zeros(0), *(row[~row.isnan()] for row in spread)])
        tokens = tokens if gather is None else torch.cat(gather(tokens))
        # torch.quantile takes 2**24 values at most.
        threshold = float(np.quantile(tokens.double().numpy(), 1 - self.fraction)) if len(tokens) else 0.0
        return [torch.where(row.isnan(), 1.0, ((row >= threshold) ^ inverted).float()) for row in spread]


@dataclass(frozen=True)
class Identity(WeightRule):
    """Rule that takes importances as weights."""

    name = "identity"

    def weigh(self, row: WeightInputs, *, inverted: bool) -> Tensor:
        """Take every importance as its unit's weight; raises `ValueError` naming the unit and value below 0."""
        row = _inverted(row, inverted)
        for k in (row.importances < 0).nonzero().flatten().tolist():
            raise ValueError(f"importances, unit {k}: as a weight it must be >= 0, got {row.importances[k].item()}")
        return row.importances


@dataclass(frozen=True)
class Redistribute(WeightRule):
    """Rule that moves a completion's advantage from its less important units to the more important ones; signed.

    Units of n_k tokens with importances v_k and mean m = sum n_k v_k / sum n_k get, for each token, the addition
    `strength A (v_k - m) / max |v - m|`. So the sum of the completion's advantages stays, whatever the number of its
    units is, and each unit's is between A (1 - strength) and A (1 + strength).
    """

    name = "redistribute"
    signed = True

    strength: NotNegative = 1.0
    """Largest change of a unit's advantage, as a share of the completion's; above 1 advantages may change sign."""

    def __post_init__(self) -> None:
        check_fields(self)

    def weigh(self, row: WeightInputs, *, inverted: bool) -> Tensor:
        """Compute what is added to the advantages of each unit of one completion."""
        values = row.importances.double() * (-1 if inverted else 1)
        if not len(values) or (spread := (row.importances.max() - row.importances.min()).item()) <= _EQUAL:
            return torch.zeros(len(values))
        sizes = torch.tensor([unit.end - unit.start for unit in row.units], dtype=torch.float64)
        values = values - (sizes @ values) / sizes.sum()
        share = min(1.0, spread / row.min_spread) if row.min_spread else 1.0
        return values / values.abs().max() * (self.strength * row.advantage * share)


@dataclass(frozen=True)
class SignGate(WeightRule):
    """Rule that adds a group's scaled importances to the advantages, where scaling leaves their sign; signed (LOTAPO).

    Over all units of the credited completions of a group, with s the median of |v| over importances v that are not 0:
    u = tanh(v / s) and z = (u - mean u) / std u. The tokens of a unit get `strength z` if z has the sign of v, else 0
    (arXiv 2607.13501, eqs. 9 to 14). Inverted, v is -v.
    """

    name = "sign_gate"
    compares = signed = absolute = by_group = True

    strength: NotNegative = 0.5
    """Factor of what is added to a unit's advantage."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, rows: Sequence[WeightInputs], *, inverted: bool, gather: Gather | None = None) -> list[Tensor]:
        """Compute what is added to the advantages; 0 on tokens of no unit. Each process has whole groups."""
        added, groups = [torch.zeros(len(row.importances)) for row in rows], [row.group for row in rows]
        for group in dict.fromkeys(groups):
            inside = [i for i, own in enumerate(groups) if own == group]
            sizes = [len(rows[i].importances) for i in inside]
            values = torch.cat([rows[i].importances for i in inside]).double().numpy() * (-1 if inverted else 1)
            if not (values != 0).any():
                continue
            bounded = np.tanh(values / np.median(np.abs(values[values != 0])))
            scaled = (bounded - bounded.mean()) / (bounded.std() + _EQUAL)
            gated = torch.from_numpy(self.strength * scaled * (scaled * values > 0)).split(sizes)
            for i, own in zip(inside, gated, strict=True):
                added[i] = own.float()
        return spread_over_tokens(added, rows, outside=0.0)


@dataclass(frozen=True)
class Added(WeightRule):
    """Rule of signed estimators, which adds importances to the advantages; no configuration names it."""

    name = "added"
    signed = True

    def weigh(self, row: WeightInputs, *, inverted: bool) -> Tensor:
        """Take every importance, or its opposite, as the addition to its unit's advantage."""
        return -row.importances if inverted else row.importances


@dataclass(frozen=True)
class OwnWeights(WeightRule):
    """Rule of the caller: a function from importances (K,), units, answer and length to weights (length,)."""

    function: Reshape

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the function's own name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, rows: Sequence[WeightInputs], *, inverted: bool, gather: Gather | None = None) -> list[Tensor]:
        """Call the function for every completion and check its result."""
        weights = []
        for b, row in enumerate(rows):
            result = self.function(*_inverted(row, inverted)[:4])
            weights.append(as_numbers(result, f"weights, row {b}", f"{row.length} tokens"))
            if len(weights[b]) != row.length:
                raise ValueError(f"weights, row {b}: gave {len(weights[b])} numbers for {row.length} tokens")
        check_finite("weights,", range(len(rows)), weights, low=0.0)
        return weights


def with_draws(
    row: WeightInputs, rule: WeightRule | None, control: Control, generator: torch.Generator
) -> WeightInputs:
    """Apply a control that draws: `permuted`, which shuffles a completion's importances, or `random`.

    Under `random` every token draws a weight uniformly within `token_draws`, if `rule` has them; else every unit draws
    an importance, uniformly in [0, 1). Without a rule values are signed, and permuted too.
    """
    if rule is None or control == "permuted":
        return row._replace(importances=row.importances[torch.randperm(len(row.importances), generator=generator)])
    count = len(row.units) if rule.token_draws is None else row.length
    values = torch.empty(count, dtype=torch.float32).uniform_(*rule.token_draws or (0.0, 1.0), generator=generator)
    return row._replace(importances=values, are_weights=rule.token_draws is not None)


WEIGHTS: dict[str, type[WeightRule]] = {
    rule.name: rule for rule in (Range, Bilevel, TopShare, Identity, Redistribute, SignGate)
}


def _inverted(row: WeightInputs, inverted: bool) -> WeightInputs:
    """Reverse the order of a completion's importances within their range."""
    values = row.importances
    return row._replace(importances=values.max() + values.min() - values) if inverted and len(values) else row
