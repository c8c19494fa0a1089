"""Credit rows of sampled tokens: find answers and units, estimate importances, weigh every token."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import LOSS_COLUMNS, Batch
from ..estimators.base import ANSWER, ENTROPIES, EXTERNAL, LOG_RATIOS, SIBLINGS, Importances, OwnFunction
from ..model.check.accuracy import ACCURACY
from ..model.limits import smallest_budget
from ..model.parts import vocab_size
from ..options import as_numbers
from ..rows import Rows, check_columns, check_finite, check_floating, keyed_generator, pad_rows, row_numbers, traces
from ..scoring.access import CAPABILITIES, ModelAccess, as_access
from ..scoring.branches import check_ids
from ..scoring.masked import ScoringWork
from ..scoring.outcomes import rounding
from ..span import Span
from ..text.find import Reasoning
from ..text.offsets import decoded
from ..tree.prefix_tree import Query
from .config import CounterfactualConfig, as_config
from .rollouts import as_sampled, shared_nodes, shared_out, with_context, with_relatives
from .shown import as_html, as_table
from .units import (
    all_written,
    check_advantages,
    compared_rows,
    find_units,
    groups_of,
    judged_spans,
    mean_advantages,
    of_all_processes,
    placeholder_of,
    scored_as,
    special_ids,
    target_ids,
)
from .weights import Added, Gather, WeightInputs, normalized_weights, opened, with_draws

FIGURES: dict[str, str] = {
    "credit/weight_mean": "mean",
    "credit/weight_std": "mean",
    "credit/scored_fraction": "mean",
    "credit/spans_mean": "mean",
    "credit/drop_mean": "mean",
    "credit/drop_max": "max",
    "credit/distractor_fraction": "mean",
    "credit/tokens_fed": "sum",
    "credit/forwards": "sum",
    "credit/added_abs_mean": "mean",
    "credit/added_fraction": "mean",
}
"""Every name that `Credit.metrics` may give, and how the values of several processes combine: mean, sum, min or max."""


@dataclass(frozen=True, repr=False)
class Credit:
    """Weights of B completions and their origin, all on the host; completions that were not scored have no spans.

    Attributes:
        weights: B tensors (T_b,) fp32, 1 on completions without credit.
        answers: B spans, None where no answer was found.
        spans: B lists of the units that were scored.
        drop: B tensors (K_b,) fp32, the importance of each unit, under masking the nats that the answer loses without
            it; 0 where rounding may account for it.
        base: (B,) fp32, log P(answer), nats; nan where it was not scored.
        work: counts of what the estimator fed; None for nothing.
        advantages: B tensors (T_b,), to train on instead of the caller's; None unless values are signed.
        added: B tensors (T_b,) fp32, the part of those that was added to the caller's; None likewise.
        texts: function from the index of a completion to the texts of its tokens, to show it; stays in the process.
    """

    weights: list[Tensor]
    answers: list[Span | None]
    spans: list[list[Span]]
    drop: list[Tensor]
    base: Tensor
    work: ScoringWork | None
    advantages: list[Tensor] | None = None
    added: list[Tensor] | None = None
    texts: Callable[[int], list[str]] | None = None

    def __repr__(self) -> str:
        return as_table(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"texts": None}

    def applied_to(self, advantages: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Multiply advantages, (B,) or B tensors (T_b,), by the weights, or replace them by signed credit; same dtype.

        Returns B tensors (T_b,), or (B,) as they are if every weight is 1. Raises `ValueError` for a dtype that is not
        floating point.
        """
        check_columns(self.weights, advantages=advantages)
        check_floating("advantages", advantages)
        if self.advantages is None and isinstance(advantages, Tensor) and all((row == 1).all() for row in self.weights):
            return advantages
        # As weighing each token's clipped loss: min(r A, clip(r) A) w = min(r A w, clip(r) A w) for w >= 0.
        signed = zip(advantages, self.advantages or advantages, self.weights, strict=True)
        return [(row * weights.to(row)).to(own) for own, row, weights in signed]

    def as_weights(self) -> list[Tensor]:
        """Return the weights; raise `ValueError` if credit is signed, which weights cannot express."""
        if self.advantages is not None:
            raise ValueError("credit is signed, which weights cannot express: train on credit.applied_to(advantages)")
        return self.weights

    def padded(self, width: int | None = None) -> Tensor:
        """Pad the weights with 1 to (B, width), by default as wide as the longest completion."""
        return pad_rows(self.weights, width, value=1)

    def take(self, rows: Sequence[int] | Tensor) -> "Credit":
        """Copy the credit of some rows, as `Batch.take` does; the work stays that of all."""
        rows, texts, columns = row_numbers(rows, len(self.weights)), self.texts, {}
        for name in _COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else [column[b] for b in rows]
        base = self.base[rows]
        return replace(self, **columns, base=base, texts=texts and (lambda i: texts(rows[i])))  # type: ignore[arg-type]

    @staticmethod
    def joined(lengths: Sequence[int], parts: Sequence[tuple[Sequence[int], "Credit"]]) -> "Credit":
        """Join the credit of parts of a batch, each with its rows; rows in no part get weight 1 and are not scored."""
        signed = any(credit.advantages is not None for _, credit in parts)
        work = [credit.work for _, credit in parts if credit.work is not None]
        count, nothing = len(lengths), [torch.zeros(length) for length in lengths]
        whole = Credit(
            weights=[torch.ones(length) for length in lengths],
            answers=[None] * count,
            spans=[[] for _ in lengths],
            drop=[torch.zeros(0)] * count,
            base=torch.full((count,), float("nan")),
            work=sum(work, ScoringWork()) if work else None,
            advantages=list(nothing) if signed else None,
            added=list(nothing) if signed else None,
        )
        for rows, credit in parts:
            for name in (*_COLUMNS, "base"):
                if (values := getattr(credit, name)) is not None:
                    for b, value in zip(rows, values, strict=True):
                        getattr(whole, name)[b] = value
        return whole

    def metrics(self, counted: Sequence[Tensor] | None = None) -> dict[str, float]:
        """Compute figures to log; a figure over nothing is omitted. Drops are in nats; a distractor's is below 0.

        For signed credit the figures describe what is added to the advantages, instead of weights and drops.
        `counted` are B tensors (T_b,), 1 on tokens that the loss counts; default all.
        """

        def tokens(column: Sequence[Tensor]) -> Tensor:
            if counted is not None:
                column = [row[mask.cpu().bool()] for row, mask in zip(column, counted, strict=True)]
            return torch.cat([torch.zeros(0), *column])

        scored = [spans for spans in self.spans if spans]
        figures = {
            "credit/tokens_fed": float(self.work.tokens_fed if self.work else 0),
            "credit/forwards": float(self.work.forwards if self.work else 0),
        }
        if self.spans:
            figures["credit/scored_fraction"] = len(scored) / len(self.spans)
        if scored:
            figures["credit/spans_mean"] = sum(map(len, scored)) / len(scored)
        if len(values := tokens(self.weights if self.added is None else self.added)):
            figures |= (
                {"credit/weight_mean": values.mean().item(), "credit/weight_std": values.std(correction=0).item()}
                if self.added is None
                else {
                    "credit/added_abs_mean": values.abs().mean().item(),
                    "credit/added_fraction": (values != 0).float().mean().item(),
                }
            )
        if self.added is None and any(map(len, self.drop)):
            drops = torch.cat(self.drop)
            figures |= {
                "credit/drop_mean": drops.mean().item(),
                "credit/drop_max": drops.max().item(),
                "credit/distractor_fraction": (drops < 0).float().mean().item(),
            }
        return figures


_COLUMNS = ("weights", "answers", "spans", "drop", "advantages", "added")  # of `Credit`, lists of B


def counterfactual_credit(
    model: nn.Module | ModelAccess,
    tokenizer: Any,
    rows: Rows | Batch,
    *,
    config: CounterfactualConfig | None = None,
    seed: int | Sequence[int] = 0,
    gather: Gather | None = None,
    **columns: Any,
) -> Credit:
    """Find answers and units of completions, estimate importances, and weigh every token.

    Args:
        model: as in `score_counterfactuals`, or another `ModelAccess`: `LogprobService`, or the `PackedForward` of
            these `rows`, with `keep_states`. Estimators that only compare completions do not use it.
        tokenizer: the one that sampled the ids.
        rows: prompts and completions, or a batch with its columns; an empty completion gets no credit.
        config: default `CounterfactualConfig()`.
        seed: integers that key draws, with the row's index: of the run, the step and the like.
        gather: function that returns its argument of each process, by rank, where `rows` are a part of the batch. The
            threshold of `weights="top"` is then that of all parts, and an estimator that is a function is given all
            rows, each of which needs its own number in `rows.index`. All processes must call this.
        **columns: those of `Batch` by name, instead of or on top of a batch's own. Rows whose advantages are all zero
            are not scored and get weight 1, nor are those of a sum of at most 0 with `completions="positive"`, which
            needs advantages, as signed values do. Groups are by default those of equal prompts. A probe gives units to
            a completion without an answer, and nothing is trained on it; a target replaces an answer, which must be
            there. With `target="gold"` each scored row needs a target, which follows the end of a completion without an
            answer. `progress` reads `old_logprobs` and `ref_logprobs`. Tokens of mask 0, by default
            those whose own advantage is 0, are in no answer and no unit, weigh 1, and count in no mean; a row without
            any other is compared with others, not scored.

    Raises:
        ValueError: columns that are not as described; an estimator that lacks a column, or gives values of the wrong
            number or that are not finite; names the row. Also rows of other numbers or lengths than those of the
            `PackedForward`, whose tokens are not compared, and rows of two processes with one number.
        TypeError: `config` is not a configuration.
        NotImplementedError: an estimator needs what this access to the model does not offer.
        Also what the estimator itself raises.
    """
    config, access = as_config(config), as_access(model)

    def checked() -> Batch:
        batch = rows.with_columns(**columns) if isinstance(rows, Batch) else Batch(rows, **columns)
        unread = {*LOSS_COLUMNS} - ({"old_logprobs", "ref_logprobs"} if LOG_RATIOS in config.needs else set())
        batch = batch.with_columns(**dict.fromkeys(unread))
        check_advantages(batch, config.completions)
        return batch

    shows_all = config.runs_estimator and isinstance(config.estimator, OwnFunction)
    whole = of_all_processes(checked(), gather) if gather is not None and shows_all else None

    def estimate() -> tuple[Assignment, Estimate]:
        assignment = Assignment.of(config, access, tokenizer, checked() if whole is None else whole, seed)
        return assignment, assignment.estimate()

    assignment, result = access.run(estimate) if config.asks_model else estimate()
    if whole is not None:
        return assignment.credit(result).take(list(map(whole.index.index, rows.index)))
    return assignment.credit(result, gather)  # outside of `run`, where processes meet in forwards only


class Estimate(NamedTuple):
    """Importances of the rows that an estimator was given, by row."""

    importances: Importances
    base: Mapping[int, float]
    compared: Mapping[int, Tensor]  # (K,), equal throughout a row if they differ by rounding only
    drops: Mapping[int, Tensor]  # (K,) the importances, 0 where rounding may account for them
    min_spreads: Mapping[int, float]  # `Range.min_spread` of a row that has none


@dataclass
class Assignment:
    """Inputs of one assignment of credit, with the answers and units of credited rows.

    `access` may be another one of the same model when `estimate` is called.
    """

    config: CounterfactualConfig
    access: ModelAccess
    tokenizer: Any
    batch: Batch
    reasoning: Mapping[int, Reasoning]
    seed: tuple[int, ...]
    sampled: Batch  # as given
    gained: Sequence[int]  # tokens of its prompt that each completion of `batch` begins with

    @classmethod
    def of(
        cls,
        config: CounterfactualConfig,
        access: ModelAccess,
        tokenizer: Any,
        batch: Batch,
        seed: int | Sequence[int],
    ) -> "Assignment":
        """Find answers and units; nothing is asked of the model."""
        try:
            keys = tuple(map(operator.index, seed if isinstance(seed, Iterable) else (seed,)))
        except TypeError as error:
            raise ValueError(f"seed must be an integer or a sequence of integers, got {seed!r}") from error
        batch = batch.with_columns(targets=target_ids(batch.targets, tokenizer))
        whole, gained = batch, [0] * len(batch)
        if ANSWER in config.needs and not config.needs & {ENTROPIES, EXTERNAL, LOG_RATIOS} and traces(batch.rows):
            whole, gained = with_context(batch, all_written(batch))
        return cls(config, access, tokenizer, whole, find_units(config, tokenizer, whole), keys, batch, gained)

    def foreseen(self) -> list[list[Query]] | None:
        """List for each row the queries that its score needs; None for none."""
        if not self.config.runs_estimator or not self._units:
            return None
        rows, part = self._scored
        of_row = dict(zip(rows, self.config.estimator.foreseen(part), strict=True))
        return [of_row.get(b, []) for b in range(len(self.batch))]

    def credit(self, estimate: Estimate, gather: Gather | None = None) -> Credit:
        """Turn importances into weights or, if they are signed, into additions to the advantages."""
        config, batch, reasoning = self.config, self.batch, self.reasoning
        rows, lengths, advantages = range(len(batch)), batch.rows.lengths, mean_advantages(batch)
        rule, groups = None if estimate.importances.signed else config.weights, groups_of(batch)
        absolute = rule is not None and rule.absolute
        inverted, is_random = config.control == "inverted", config.control == "random"
        none, weighed = torch.zeros(0), dict[int, WeightInputs]()
        for b, row in reasoning.items() if config.control != "off" else ():
            importances = (estimate.drops if absolute else estimate.compared).get(b, none)
            if config.rewards_units and advantages[b] < 0 and not absolute:
                importances = -importances  # what is good in itself deserves less of a negative advantage
            spans = row.spans if b in estimate.compared or is_random else []
            spans = opened(spans) if config.open_spans else spans
            weighed[b] = WeightInputs(
                importances, spans, row.answer, lengths[b],
                min_spread=estimate.min_spreads.get(b, 0.0), advantage=advantages[b], group=int(groups[b]),
            )  # fmt: skip
        nodes, judged = shared_nodes(batch.rows), [b for b, row in weighed.items() if row.units]
        weighed = with_relatives(weighed, nodes, batch.rows.rollouts, pooled=rule is not None and rule.compares)
        for b in weighed if config.control in ("permuted", "random") else ():
            generator = keyed_generator(*self.seed, batch.index[b], "weights")
            weighed[b] = with_draws(weighed[b], rule, config.control, generator)  # type: ignore[arg-type]
        lines = (rule or Added())(list(weighed.values()), inverted=inverted, gather=gather)
        signed = config.control != "off" and (rule is None or rule.signed)
        by_row, outside = dict(zip(weighed, lines, strict=True)), 0.0 if signed else 1.0
        written, sampled = all_written(batch), all_written(self.sampled)
        result = [by_row[b] if b in by_row else torch.full((length,), outside) for b, length in enumerate(lengths)]
        for b, line in by_row.items():
            own = None if written[b].all() else written[b]
            line = line[: lengths[b]] if own is None else torch.where(own, line[: len(own)], outside)
            scaled = config.normalize and not signed and (line if own is None else line[own]).any()
            result[b] = normalized_weights(line, config.normalize, own) if scaled else line
        if nodes:
            result = shared_out(result, nodes, written, judged)
            for b, n in enumerate(self.gained):
                result[b] = torch.where(sampled[b], result[b][n:], outside)
        weights, added = ([torch.ones(len(row)) for row in sampled], result) if signed else (result, None)
        units = [as_sampled(reasoning.get(b), estimate.drops.get(b, none), self.gained[b], sampled[b]) for b in rows]
        return Credit(
            weights=weights,
            answers=[answer for answer, _, _ in units],
            spans=[spans for _, spans, _ in units],
            drop=[drop for _, _, drop in units],
            base=torch.tensor([estimate.base.get(b, math.nan) for b in rows]),
            work=estimate.importances.work,
            advantages=None if added is None else self._advantages(added),
            added=added,
            texts=lambda b: [decoded([i], self.tokenizer) for i in self.sampled.rows.completions[b].tolist()],
        )

    def estimate(self) -> Estimate:
        """Run the estimator on the units of credited rows."""
        config, access, units = self.config, self.access, self._units
        if not config.runs_estimator or not units:
            return Estimate(Importances([], signed=config.weights is None), {}, {}, {}, {})
        capabilities = config.estimator.needs & set(CAPABILITIES)
        if missing := sorted(capabilities - access.capabilities):
            raise NotImplementedError(
                f"{config.asked_for}: it needs {CAPABILITIES[missing[0]]}, and the model is asked through "
                f"{type(access).__name__}"
            )
        rows, part = self._scored
        result = access.apply(config.estimator, part) if capabilities else config.estimator(access, part)
        importances = _checked(result, [units.get(b, []) for b in rows], part.index)
        importances = replace(importances, signed=importances.signed or config.weights is None)
        accuracy = ACCURACY[access.dtype]
        compared, drops = _beyond_rounding(importances, part.answers, accuracy)
        base = [] if importances.base is None else importances.base.float().tolist()
        spreads = [_min_spread(importances, answer, accuracy) for answer in part.answers]
        columns = (dict(zip(rows, column)) for column in (base, compared, drops, spreads))  # noqa: B905
        return Estimate(importances, *columns)

    @cached_property
    def _units(self) -> dict[int, list[Span]]:
        return {b: row.spans for b, row in self.reasoning.items() if row.spans}

    @cached_property
    def _scored(self) -> tuple[list[int], Batch]:
        """List the rows that the estimator scores or compares, and make its batch of them."""
        config, none, masks = self.config, Reasoning(None, 0, []), ANSWER in self.config.estimator.needs
        rows = compared_rows(self.batch) if config.compares else list(self._units)
        special, gold = special_ids(self.tokenizer), config.target == "gold"
        has_model = self.access.module is not None and config.needs & set(CAPABILITIES)
        model = self.access.model if has_model else None
        vocab = None if model is None else vocab_size(model)
        groups = groups_of(self.batch)
        if SIBLINGS in config.needs and len(groups.unique()) == len(groups):  # with those that have no reward
            raise ValueError("groups: no two completions are of one group, so there is nothing to compare them with")
        columns = []
        for b in rows:
            row = self.reasoning.get(b, none)
            row = row._replace(spans=judged_spans(config, self.batch, b, row, special))
            columns.append(scored_as(self.batch, b, row, special, model, gold))
        part, scored = self.batch.take(rows), None  # a copy: an estimator may write
        completions = [completion for completion, _ in columns]
        if any(map(operator.is_not, completions, (self.batch.rows.completions[b] for b in rows))):
            scored = Rows(part.rows.prompts, completions, part.index, part.rows.rollouts)
        check_ids(model, part.rows if scored is None else scored)
        return rows, part.with_columns(
            groups=groups[rows],
            scored=scored,
            units=[row.spans for _, row in columns],
            answers=[row.answer if row.spans else None for _, row in columns],
            reasoning_ends=[row.end for _, row in columns],
            placeholder=placeholder_of(config, self.tokenizer, vocab) if masks else None,
            token_budget=smallest_budget(config.token_budget, self.sampled.token_budget),
            seed=self.seed,
            special_ids=special,
        )

    def _advantages(self, added: Sequence[Tensor]) -> list[Tensor]:
        own, name = self.sampled.advantages, self.config.estimator.name
        if own is None:
            cause = f"estimator={name!r}" if self.config.weights is None else f"weights={self.config.weights.name!r}"
            raise ValueError(f"advantages must be given: {cause} adds to them, got None")
        return [row.float() + extra for row, extra in zip(own, added, strict=True)]


_MIN_SPREAD = 0.1  # nats, or probability


def _min_spread(importances: Importances, answer: Span | None, accuracy: float) -> float:
    """Give the least difference of two changes of an answer that is worth the whole range: more than rounding's."""
    if answer is None or importances.change_of is None:
        return 0.0
    tokens = answer.end - answer.start
    errors = accuracy * (tokens**0.5 if importances.change_of == "logprob" else 1 / tokens**0.5)
    return max(_MIN_SPREAD, math.hypot(errors, errors))


def _beyond_rounding(
    importances: Importances, answers: Sequence[Span | None], accuracy: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Settle what rounding leaves open: rows to compare, equal where they may be, and drops, 0 where they may be.

    Importances round only if they are changes of an answer's log-prob or probability.
    """
    compared, drops = [*importances.values], [*importances.values]
    spans = [span if len(values) else None for values, span in zip(drops, answers, strict=True)]
    judged = [(i, span.end - span.start) for i, span in enumerate(spans) if span and importances.change_of]
    if not judged:
        return compared, drops
    # All rows at once, each number with its row's: a dozen operations on each row took five times as long.
    rows, tokens = [i for i, _ in judged], torch.tensor([count for _, count in judged]).float()
    sizes = [len(drops[i]) for i in rows]
    values, of_row = torch.cat([drops[i] for i in rows]), torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes))
    if importances.base is not None:
        scale = tokens if importances.change_of == "mean_logprob" else torch.ones(len(rows))
        base = importances.base[rows].float().cpu() * scale
        own = rounding(base, tokens, accuracy) / scale
        masked = base[of_row] - values * scale[of_row]
        errors = rounding(masked, tokens[of_row], accuracy) / scale[of_row]
    else:  # of a probability by the mean over the answer's tokens
        own = accuracy / tokens**0.5
        errors = own[of_row]
    kept = values.where(values.abs() > torch.hypot(own[of_row], errors), 0.0)
    starts, numbers = np.cumsum(sizes) - sizes, values.numpy()
    most, least = (
        torch.from_numpy(starts + [of(each) for each in np.split(numbers, starts[1:])]) for of in (np.argmax, np.argmin)
    )
    equal = values[most] - values[least] <= torch.hypot(errors[most], errors[least])
    for i, is_equal, row in zip(rows, equal.tolist(), kept.split(sizes), strict=True):
        drops[i] = row
        if is_equal:
            compared[i] = compared[i].mean().expand(len(row))
    return compared, drops


def _checked(result: Any, units: Sequence[Sequence[Span]], index: Sequence[int]) -> Importances:
    """Check the result of an estimator; raises `ValueError` naming row, unit and value."""
    importances = result if isinstance(result, Importances) else Importances(result)
    if not isinstance(importances.values, list | tuple):
        raise ValueError(
            "estimator: must return Importances, or a list with a row of numbers for each of "
            f"{len(index)} completions, got {type(importances.values).__name__}"
        )
    if len(importances.values) != len(index):
        raise ValueError(f"estimator: gave values for {len(importances.values)} rows, asked for {len(index)}")
    values = []
    for b, row, row_units in zip(index, importances.values, units, strict=True):
        numbers = as_numbers(row, f"estimator, row {b}", f"{len(row_units)} units")
        if numbers.shape != (len(row_units),):
            raise ValueError(f"estimator, row {b}: gave shape {tuple(numbers.shape)} for {len(row_units)} units")
        values.append(numbers)
    check_finite("estimator,", index, values, of="unit")
    return replace(importances, values=values)
