"""Credit rows of sampled tokens: find answers and units, estimate importances, weigh every token."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..estimators.base import ANSWER, SIBLINGS, Importances, OwnFunction
from ..estimators.probes import Probe
from ..model.check.accuracy import ACCURACY
from ..model.parts import vocab_size
from ..options import as_numbers
from ..rows import Rows, equal_prompts, keyed_generator, pad_rows
from ..scoring.access import CAPABILITIES, ModelAccess, TrainingForward, as_access
from ..scoring.batch import ScoredBatch
from ..scoring.masked import ScoringWork
from ..scoring.outcomes import rounding
from ..span import Span
from ..text.find import Reasoning
from ..text.offsets import decoded
from ..tree.prefix_tree import Query
from .config import CounterfactualConfig, as_config
from .shown import as_html, as_table
from .units import CreditInputs, find_units, of_all_processes, placeholder_of, scored_as, special_ids
from .weights import Gather, WeightInputs, normalized_weights, opened, spread_over_tokens, with_draws

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
"""Every name that `Credit.metrics` may give, and how those of several processes combine: mean, sum, min or max."""


@dataclass(frozen=True, repr=False)
class Credit:
    """Weights of B completions and their origin, all on the host; completions that were not judged have no spans.

    Attributes:
        weights: B tensors (T_b,) fp32, 1 on completions without credit.
        answers: B spans, None where no answer was found.
        spans: B lists of the units that were judged.
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

    def padded(self, width: int | None = None) -> Tensor:
        """Pad the weights with 1 to (B, width), by default as wide as the longest completion."""
        return pad_rows(self.weights, width, value=1)

    def take(self, rows: Sequence[int]) -> "Credit":
        """Copy the credit of some rows, in the order of `rows`; the work stays that of all."""
        texts, columns = self.texts, {}
        for name in _COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else [column[b] for b in rows]
        base = self.base[list(rows)]
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
        """Compute figures to log; one over nothing is left out. Drops are in nats; one below 0 is a distractor's.

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


def counterfactual_weights(
    model: nn.Module | ModelAccess,
    tokenizer: Any,
    rows: Rows,
    *,
    advantages: Tensor | Sequence[Tensor] | None = None,
    config: CounterfactualConfig | None = None,
    seed: int | Sequence[int] = 0,
    mask: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Weigh the tokens of rows, B tensors (T_b,) fp32: `counterfactual_credit(...).weights`.

    Also raises `ValueError` if credit is signed, which weights cannot express.
    """
    credit = counterfactual_credit(model, tokenizer, rows, advantages=advantages, config=config, seed=seed, mask=mask)
    if credit.advantages is not None:
        raise ValueError("config: its estimator is signed; use counterfactual_credit and train on its advantages")
    return credit.weights


def counterfactual_credit(
    model: nn.Module | ModelAccess,
    tokenizer: Any,
    rows: Rows,
    *,
    advantages: Tensor | Sequence[Tensor] | None = None,
    config: CounterfactualConfig | None = None,
    seed: int | Sequence[int] = 0,
    groups: Tensor | None = None,
    rewards: Tensor | Sequence[float] | None = None,
    entropies: Sequence[Tensor] | None = None,
    external: Sequence[Tensor | Sequence[float]] | None = None,
    probes: Sequence[Probe | None] | None = None,
    targets: Sequence[Tensor | None] | None = None,
    mask: Sequence[Tensor] | None = None,
    gather: Gather | None = None,
) -> Credit:
    """Find answers and units of completions, estimate importances, and weigh every token.

    Args:
        model: as in `score_counterfactuals`, or another `ModelAccess`: `LogprobService`, or the `TrainingForward` of a
            forward that was given the same `rows`. Estimators that only compare completions do not use it.
        tokenizer: the one that sampled the ids.
        rows: prompts and completions; an empty completion gets no credit.
        advantages: (B,) or B tensors (T_b,), float; finite, but for completions that are empty or have a reward of nan.
            Those where they are all zero are not judged and get weight 1, nor are those of a sum of at most 0 with
            `completions="positive"`. Required by that and by signed values.
        config: default `CounterfactualConfig()`.
        seed: integers that key draws, with the row's index: of the run, the step and the like.
        groups: (B,) int64, equal for completions that are compared with each other; default by equal prompts.
        rewards: (B,) float, for estimators that compare completions; one of nan is neither compared nor credited.
        entropies: B tensors (T_b,) of the distribution of each sampled token, nats, for `entropy`.
        external: B tensors or lists with a number for each unit or each token of the completion, for `external`.
        probes: for each completion a `Probe` to append and score in place of its own answer, or None. Gives units to
            completions without an answer; nothing is trained on it.
        targets: for each completion 1-D int64 tokens to score in place of its own answer, which it must have, or None.
        mask: B tensors (T_b,), 1 on tokens that the policy wrote, 0 on others, such as a tool's, in any number of runs;
            by default those whose advantage is not 0, where advantages are per token, else all. Tokens of others are in
            no answer and no unit, weigh 1, and count in no mean. A row without any is compared with others, not judged.
        gather: function that returns its argument of each process, by rank, where `rows` are a part of the batch. The
            threshold of `weights="top"` is then that of all parts, and an estimator that is a function is given all
            rows, which need a number of their own in `rows.index`. All processes must call this.

    Raises:
        ValueError: columns that are not as described; an estimator that lacks a column, or gives values of the wrong
            number or that are not finite; names the row. Also rows of other numbers or lengths than those of the
            `TrainingForward`, whose tokens are not compared, and rows of two processes with one number.
        TypeError: `config` is not a configuration.
        NotImplementedError: an estimator needs what this access to the model does not offer.
        Also what the estimator itself raises.
    """
    config, access = as_config(config), as_access(model)

    def checked() -> CreditInputs:
        return CreditInputs.of(
            rows, advantages, credited_rows=config.completions, groups=groups, rewards=rewards, entropies=entropies,
            external=external, probes=probes, targets=targets, mask=mask,
        )  # fmt: skip

    shows_all = config.runs_estimator and isinstance(config.estimator, OwnFunction)
    whole = of_all_processes(checked(), gather) if gather is not None and shows_all else None

    def estimate() -> tuple[Assignment, Estimate]:
        inputs = checked() if whole is None else whole
        if isinstance(access, TrainingForward):
            access.forward.require_rows(rows)
        assignment = Assignment.of(config, access, tokenizer, inputs, seed)
        return assignment, assignment.estimate()

    assignment, result = access.run(estimate) if config.asks_model else estimate()
    if whole is not None:
        return assignment.credit(result).take(list(map(whole.rows.index.index, rows.index)))
    return assignment.credit(result, gather)  # outside of `run`, where processes meet in forwards only


class Estimate(NamedTuple):
    """Importances of the rows that an estimator was given, by row."""

    importances: Importances
    base: Mapping[int, Tensor]  # ()
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
    inputs: CreditInputs
    reasoning: Mapping[int, Reasoning]
    seed: tuple[int, ...]

    @classmethod
    def of(
        cls,
        config: CounterfactualConfig,
        access: ModelAccess,
        tokenizer: Any,
        inputs: CreditInputs,
        seed: int | Sequence[int],
    ) -> "Assignment":
        """Find answers and units; nothing is asked of the model."""
        try:
            keys = tuple(map(operator.index, seed if isinstance(seed, Iterable) else (seed,)))
        except TypeError as error:
            raise ValueError(f"seed must be an integer or a sequence of integers, got {seed!r}") from error
        return cls(config, access, tokenizer, inputs, find_units(config, tokenizer, inputs), keys)

    def foreseen(self) -> list[list[Query]] | None:
        """List for each row the queries that judging it will ask; None for none."""
        if not self.config.runs_estimator or not self._units:
            return None
        queries = self.config.estimator.foreseen(self._batch)
        of_row = {row.place: own for row, own in zip(self._batch.rows, queries, strict=True)}
        return [of_row.get(b, []) for b in range(len(self.inputs.rows))]

    def credit(self, estimate: Estimate, gather: Gather | None = None) -> Credit:
        """Turn importances into weights or, if they are signed, into additions to the advantages."""
        config, inputs, reasoning = self.config, self.inputs, self.reasoning
        index, rows = inputs.rows.index, range(len(inputs.rows))
        rule = None if estimate.importances.signed else config.weights
        inverted, is_random = config.control == "inverted", config.control == "random"
        weights = [torch.ones(length) for length in inputs.rows.lengths]
        added = None
        weighed: dict[int, WeightInputs] = {}
        for b, row in reasoning.items() if config.control != "off" else ():
            importances = estimate.compared.get(b, torch.zeros(0))
            spans = row.spans if b in estimate.compared or is_random else []
            spans = opened(spans) if config.open_spans else spans
            weighed[b] = WeightInputs(
                importances, spans, row.answer, inputs.rows.lengths[b], min_spread=estimate.min_spreads.get(b, 0.0)
            )
            if config.control in ("permuted", "random"):
                generator = keyed_generator(*self.seed, index[b], "weights")
                weighed[b] = with_draws(weighed[b], rule, config.control, generator)
        if rule is not None:
            for b, line in zip(weighed, rule(list(weighed.values()), inverted=inverted, gather=gather), strict=True):
                written = inputs.writes(b)
                line = torch.where(written, line, 1.0)
                weights[b] = normalized_weights(line, config.normalize, written) if line[written].any() else line
        elif config.control != "off":
            added = [torch.zeros(length) for length in inputs.rows.lengths]
            for b, (importances, units, _, length, *_) in weighed.items():
                values = -importances if inverted else importances
                added[b] = spread_over_tokens(values, units, length).nan_to_num(nan=0.0)
        none, nan = torch.zeros(0), torch.tensor(float("nan"))
        return Credit(
            weights=weights,
            answers=[reasoning[b].answer if b in reasoning else None for b in rows],
            spans=[reasoning[b].spans if b in reasoning else [] for b in rows],
            drop=[estimate.drops.get(b, none) for b in rows],
            base=torch.stack([estimate.base.get(b, nan) for b in rows]) if len(rows) else none,
            work=estimate.importances.work,
            advantages=None if added is None else self._advantages(added),
            added=added,
            texts=lambda b: [decoded([i], self.tokenizer) for i in inputs.rows.completions[b].tolist()],
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
        batch = self._batch
        places = [row.place for row in batch.rows]
        result = access.apply(config.estimator, batch) if capabilities else config.estimator(access, batch)
        importances = _checked(result, [units.get(b, []) for b in places], batch.index)
        importances = replace(importances, signed=importances.signed or config.weights is None)
        accuracy = ACCURACY[access.dtype]
        compared, drops = _beyond_rounding(importances, batch.answers, accuracy)
        base = [] if importances.base is None else list(importances.base.float().cpu())
        spreads = [_min_spread(importances, answer, accuracy) for answer in batch.answers]
        columns = (dict(zip(places, column)) for column in (base, compared, drops, spreads))  # noqa: B905
        return Estimate(importances, *columns)

    @cached_property
    def _units(self) -> dict[int, list[Span]]:
        return {b: row.spans for b, row in self.reasoning.items() if row.spans}

    @cached_property
    def _batch(self) -> ScoredBatch:
        """Build the estimator's batch of the rows that it judges or compares, in packing order."""
        config, inputs, none = self.config, self.inputs, Reasoning(None, 0, [])
        rows = inputs.with_tokens if config.compares else list(self._units)
        special, masks = special_ids(self.tokenizer), ANSWER in config.estimator.needs
        some = inputs.rows.take(rows)
        has_model = self.access.module is not None and config.needs & set(CAPABILITIES)
        model = self.access.model if has_model else None
        vocab = None if model is None else vocab_size(model)
        groups = torch.tensor(equal_prompts(inputs.rows.prompts)) if inputs.groups is None else inputs.groups
        if SIBLINGS in config.needs and len(groups.unique()) == len(groups):  # with those that have no reward
            raise ValueError("groups: no two completions are of one group, so there is nothing to compare them with")
        scored = {b: scored_as(inputs, b, self.reasoning.get(b, none), special, vocab) for b in rows}
        batch = ScoredBatch.of(
            model,
            Rows(some.prompts, [scored[b][0] for b in rows], some.index),
            [scored[b][1].spans for b in rows],
            [scored[b][1].answer if scored[b][1].spans else None for b in rows],
            mask=placeholder_of(config, self.tokenizer, vocab) if masks else None,
            token_budget=config.token_budget,
            places=rows,
            apart=masks,
        )
        places = [row.place for row in batch.rows]

        def column(values: Any) -> Any:
            if values is None:
                return None
            if isinstance(values, Tensor):
                return values[places]
            return [values[b].clone() if isinstance(values[b], Tensor) else values[b] for b in places]  # it may write

        return replace(
            batch,
            lengths=[len(inputs.rows.completions[b]) for b in places],
            reasoning_ends=[scored[b][1].end for b in places],
            seed=self.seed,
            groups=column(groups),
            special_ids=special,
            **{name: column(getattr(inputs, name)) for name in ("rewards", "advantages", "entropies", "external")},
        )

    def _advantages(self, added: Sequence[Tensor]) -> list[Tensor]:
        own, name = self.inputs.advantages, self.config.estimator.name
        if own is None:
            raise ValueError(f"advantages must be given: estimator={name!r} adds to them, got None")
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
    for i, each, error, row in zip(rows, *(x.split(sizes) for x in (values, errors, kept)), strict=True):
        drops[i], (low, high) = row, each.aminmax()
        most, least = error[each.argmax()], error[each.argmin()]
        if high - low <= torch.hypot(most, least):
            compared[i] = each.mean().expand(len(each))
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
        if (bad := (~torch.isfinite(numbers)).nonzero()).numel():
            k = int(bad[0])
            raise ValueError(f"estimator, row {b}, unit {k}: must be finite, got {numbers[k].item()}")
        values.append(numbers)
    return replace(importances, values=values)
