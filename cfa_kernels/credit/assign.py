"""Credit rows of sampled tokens: find answers and units, estimate importances, weigh every token."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch import LOSS_COLUMNS, Batch
from ..estimators.base import LOG_RATIOS, Importances, OwnFunction
from ..model.check.accuracy import ACCURACY
from ..ops.upload import upload
from ..options import as_numbers
from ..rows import Rows, check_columns, check_finite, check_floating, keyed_generator, pad_rows, row_numbers
from ..scoring.access import CAPABILITIES, ModelAccess, as_access
from ..scoring.masked import ScoringWork
from ..span import Span
from ..text.find import Reasoning
from ..text.offsets import decoded
from .config import CounterfactualConfig, as_config
from .shown import as_html, as_table
from .units import (
    batch_to_score,
    check_needed,
    find_units,
    groups_of,
    mean_advantages,
    of_all_processes,
    target_ids,
    written,
)
from .weights import Added, Gather, WeightInputs, normalized_weights, opened, side_by_side, with_draws

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
    """Weights of B completions and their origin, all on the host; completions that were not scored have no spans."""

    weights: list[Tensor]  # B tensors (T_b,) fp32, 1 on completions without credit
    answers: list[Span | None]  # B, None where no answer was found
    spans: list[list[Span]]  # B lists of the units that were scored
    drop: list[Tensor]  # B tensors (K_b,) fp32, importances: under masking nats; 0 where rounding may account for it
    base: Tensor  # (B,) fp32, log P(answer), nats; nan where it was not scored
    work: ScoringWork | None  # counts of what the estimator fed; None for nothing
    advantages: list[Tensor] | None = None  # B tensors (T_b,), to train on instead of the caller's, if credit is signed
    added: list[Tensor] | None = None  # B tensors (T_b,) fp32, the part of those that was added to the caller's
    texts: Callable[[int], list[str]] | None = None  # of the tokens of a completion, by index; stays in the process

    def __repr__(self) -> str:
        return as_table(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"texts": None}

    def applied_to(self, advantages: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Multiply advantages, (B,) or B tensors (T_b,), by the weights, or replace them by signed credit; same dtype.

        Returns B tensors (T_b,), or (B,) as they are if every weight is 1.
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
            [torch.ones(length) for length in lengths], [None] * count, [[] for _ in lengths], [torch.zeros(0)] * count,
            torch.full((count,), float("nan")), sum(work, ScoringWork()) if work else None,
            list(nothing) if signed else None, list(nothing) if signed else None,
        )  # fmt: skip
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
        column, work = self.weights if self.added is None else self.added, self.work or ScoringWork()
        if counted is not None:
            column = [row[mask.cpu().bool()] for row, mask in zip(column, counted, strict=True)]
        values, drops = (torch.cat([torch.zeros(0), *rows]) for rows in (column, self.drop))
        sizes = [len(spans) for spans in self.spans if spans]
        figures = {"tokens_fed": float(work.tokens_fed), "forwards": float(work.forwards)}
        if self.spans:
            figures["scored_fraction"] = len(sizes) / len(self.spans)
        if sizes:
            figures["spans_mean"] = sum(sizes) / len(sizes)
        if len(values) and self.added is None:
            figures |= {"weight_mean": values.mean().item(), "weight_std": values.std(correction=0).item()}
        elif len(values):
            share = (values != 0).float().mean().item()
            figures |= {"added_abs_mean": values.abs().mean().item(), "added_fraction": share}
        if len(drops) and self.added is None:
            share = (drops < 0).float().mean().item()
            figures |= {"drop_mean": drops.mean().item(), "drop_max": drops.max().item(), "distractor_fraction": share}
        return {f"credit/{name}": value for name, value in figures.items()}


_COLUMNS = ("weights", "answers", "spans", "drop", "advantages", "added")  # of `Credit`, lists of B


def counterfactual_credit(
    model: nn.Module | ModelAccess,
    tokenizer: Any,
    rows: Rows | Batch,
    *,
    config: CounterfactualConfig | str | Mapping[str, Any],
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
        config: configuration of credit, the name of a preset, or a mapping of options by path.
        seed: integers that key draws, with the row's index: of the run, the step and the like.
        gather: function that returns its argument of each process, by rank, where `rows` are a part of the batch. The
            threshold of `weights="top"` is then that of all parts, and an estimator that is a function is given all
            rows, each of which needs its own number in `rows.index`. All processes must call this.
        **columns: those of `Batch` by name, instead of or on top of a batch's own. Rows whose advantages are all zero
            are not scored and get weight 1, nor are those of a sum of at most 0 with `completions="positive"`. Groups
            are by default those of equal prompts. A probe gives units to a completion without an answer, and nothing is
            trained on it; a target replaces an answer. With `target="gold"` each scored row needs a target, which
            follows the end of a completion without an answer. Tokens of mask 0, by default those whose own advantage
            is 0, are in no answer and no unit, weigh 1, and count in no mean.

    Raises:
        ValueError: columns that are not as described, or an estimator that lacks one or gives other values than one
            finite number for each unit; names the row. Also rows that are not those of the `PackedForward`.
        NotImplementedError: an estimator needs what this access to the model does not offer.
    """
    options = as_config(config)

    def checked() -> Batch:
        batch = rows.with_columns(**columns) if isinstance(rows, Batch) else Batch(rows, **columns)
        check_needed(options, batch)
        return batch

    return queue_credit(model, tokenizer, checked, config=options, seed=seed, gather=gather)[1]()


def queue_credit(
    model: nn.Module | ModelAccess,
    tokenizer: Any,
    checked: Callable[[], Batch],
    *,
    config: CounterfactualConfig,
    seed: int | Sequence[int],
    gather: Gather | None,
    queues: bool = False,
) -> tuple[list[Tensor] | None, Callable[[], Credit]]:
    """Assign the credit of a batch as `counterfactual_credit` does; `checked` gives it, or raises, in each process.

    Returns B tensors (T_b,) of weights where the scores are, if the host has not read these, else None; and a function
    that gives the credit, or raises what its scores call for. With `queues`, an access that is a `PackedForward` on a
    device, they are unread if estimator and rule are `on_device`.
    """
    access = as_access(model)
    try:
        keys = tuple(map(operator.index, seed if isinstance(seed, Iterable) else (seed,)))
    except TypeError as error:
        raise ValueError(f"seed must be an integer or a sequence of integers, got {seed!r}") from error

    def own_batch() -> Batch:
        unread = {*LOSS_COLUMNS} - ({"old_logprobs", "ref_logprobs"} if LOG_RATIOS in config.needs else set())
        return checked().exchanged(**dict.fromkeys(unread))

    whole: Batch | None = None
    if gather is not None and config.runs_estimator and isinstance(config.estimator, OwnFunction):
        own = own_batch()
        whole, gather = of_all_processes(own, gather), None

    def scored() -> tuple[Batch, dict[int, Reasoning], _Scores, Callable[[], _Scores] | None]:
        batch = own_batch() if whole is None else whole
        if batch.targets is not None:
            batch = batch.exchanged(targets=target_ids(batch.targets, tokenizer))
        units = find_units(config, tokenizer, batch)
        return batch, units, *_score(config, access, tokenizer, batch, units, keys, queues)

    batch, units, scores, read = access.run(scored) if config.asks_model else scored()
    credit = _weigh(config, tokenizer, batch, units, scores, keys, gather)  # outside of `run`: processes may meet here
    if read is not None:
        return credit.weights, lambda: _weigh(config, tokenizer, batch, units, read(), keys, gather)
    credit = credit if whole is None else credit.take([*map(whole.index.index, own.index)])
    return None, lambda: credit


class _RowScores(NamedTuple):
    """Scores of the units of one row."""

    importances: Tensor  # (K,), equal throughout if they differ by rounding only
    drops: Tensor  # (K,), 0 where rounding may account for them
    base: float = math.nan
    min_spread: float = 0.0  # `Range.min_spread` if it has none


class _Scores(NamedTuple):
    """Scores of the rows that an estimator was given, by row."""

    rows: dict[int, _RowScores]
    signed: bool
    work: ScoringWork | None = None


_MIN_SPREAD = 0.1  # nats, or probability: the least difference of two changes that is worth the whole range


def _score(
    config: CounterfactualConfig,
    access: ModelAccess,
    tokenizer: Any,
    batch: Batch,
    units: Mapping[int, Reasoning],
    keys: tuple[int, ...],
    queues: bool,
) -> tuple[_Scores, Callable[[], _Scores] | None]:
    """Run the estimator on the units of credited rows, and settle what rounding leaves open.

    Scores that are left on a device have no base, and are followed by a function that reads and checks them.
    """
    if not config.runs_estimator or not any(row.spans for row in units.values()):
        return _Scores({}, config.weights is None), None
    capabilities = config.estimator.needs & set(CAPABILITIES)
    for missing in sorted(capabilities - access.capabilities):
        way = type(access).__name__
        raise NotImplementedError(
            f"{config.asked_for}: it needs {CAPABILITIES[missing]}, and the model is asked through {way}"
        )
    model = access.model if capabilities and access.module is not None else None
    rows, part = batch_to_score(config, tokenizer, batch, units, model)
    part.seed, rule = keys, config.weights
    stays = rule is not None and rule.on_device and config.estimator.on_device and config.control != "permuted"
    part.unread = [] if queues and stays else None
    result = access.apply(config.estimator, part) if capabilities else config.estimator(access, part)
    rounding = 2**0.5 * ACCURACY[access.dtype]  # of a change, which is the difference of two scores

    def settled(importances: Importances) -> _Scores:
        values, low, high, mean = side_by_side(importances.values)
        sizes, by_row = [*map(len, importances.values)], {}
        drops = values.masked_fill(values.abs() <= rounding, 0).split(sizes)
        compared = torch.where(high - low <= rounding, mean, values).split(sizes)
        bases = [math.nan] * len(rows) if importances.base is None else importances.base.tolist()
        columns = zip(rows, importances.values, compared, drops, bases, part.answers, strict=True)
        for b, own, level, drop, base, answer in columns:
            is_change, least = importances.change_of is not None and answer is not None, max(_MIN_SPREAD, rounding)
            by_row[b] = _RowScores(level, drop, base, least) if is_change else _RowScores(own, own, base)
        return _Scores(by_row, importances.signed or config.weights is None, importances.work)

    def read() -> _Scores:
        for check in part.unread or ():
            check()
        values = torch.cat(result.values).cpu().split([*map(len, result.values)])
        return settled(_checked(replace(result, values=[*values]), part))

    return (settled(replace(result, base=None)), read) if part.unread else (settled(_checked(result, part)), None)


def _weigh(
    config: CounterfactualConfig,
    tokenizer: Any,
    batch: Batch,
    units: Mapping[int, Reasoning],
    scores: _Scores,
    keys: tuple[int, ...],
    gather: Gather | None,
) -> Credit:
    """Turn scores into weights or, if they are signed, into additions to the advantages."""
    rule, own, groups = None if scores.signed else config.weights, mean_advantages(batch), groups_of(batch).tolist()
    is_absolute, lengths = rule is not None and rule.absolute, batch.rows.lengths
    is_good = config.target == "gold" or config.estimator.is_reward  # and deserves less of a negative advantage
    some = next(iter(scores.rows.values()), _RowScores(torch.zeros(0), torch.zeros(0)))
    none = _RowScores(some.importances[:0], some.drops[:0])
    inputs = dict[int, WeightInputs]()
    for b, row in units.items() if config.control != "off" else ():
        score = scores.rows.get(b, none)
        values = score.drops if is_absolute else score.importances
        values = -values if is_good and own[b] < 0 and not is_absolute else values
        spans = row.spans if b in scores.rows or config.control == "random" else []
        inputs[b] = WeightInputs(
            values, opened(spans) if config.open_spans else spans, row.answer, lengths[b],
            min_spread=score.min_spread, advantage=own[b], group=groups[b],
        )  # fmt: skip
        if config.control in ("permuted", "random"):
            generator = keyed_generator(*keys, batch.index[b], "weights")
            inputs[b] = with_draws(inputs[b], rule, config.control, generator)
    lines = (rule or Added())([*inputs.values()], inverted=config.control == "inverted", gather=gather)
    is_signed = config.control != "off" and (rule is None or rule.signed)
    outside = 0.0 if is_signed else 1.0
    result = [some.drops.new_full((length,), outside) for length in lengths]
    masks = upload([written(batch, b).numpy() for b in inputs], some.drops.device)
    for b, line, mask in zip(inputs, lines, masks, strict=True):
        result[b] = line.masked_fill(~mask, outside)
        if config.normalize and not is_signed:
            result[b] = normalized_weights(result[b], mask)
    signed = None
    if is_signed:
        if batch.advantages is None:
            raise ValueError(f"advantages must be given: {(rule or config.estimator).name!r} adds to them, got None")
        signed = [row.float() + extra for row, extra in zip(batch.advantages, result, strict=True)]
    reasoning = [units.get(b, Reasoning(None, 0, [])) for b in range(len(batch))]
    return Credit(
        weights=[torch.ones(length) for length in lengths] if is_signed else result,
        answers=[row.answer for row in reasoning],
        spans=[row.spans for row in reasoning],
        drop=[scores.rows.get(b, none).drops.clone() for b in range(len(batch))],
        base=torch.tensor([scores.rows.get(b, none).base for b in range(len(batch))]),
        work=scores.work,
        advantages=signed,
        added=result if is_signed else None,
        texts=lambda b: [decoded([i], tokenizer) for i in batch.rows.completions[b].tolist()],
    )


def _checked(result: Any, part: Batch) -> Importances:
    """Check the result of an estimator for `part`; raises `ValueError` naming row, unit and value."""
    importances = result if isinstance(result, Importances) else Importances(result)
    if not isinstance(importances.values, list | tuple) or len(importances.values) != len(part):
        rows: Any = importances.values
        got = f"{len(rows)} rows" if isinstance(rows, list | tuple) else type(rows).__name__
        raise ValueError(f"estimator: must return Importances, or a row of numbers for each of {len(part)}, got {got}")
    values = []
    for b, row, row_units in zip(part.index, importances.values, part.units, strict=True):
        values.append(as_numbers(row, f"estimator, row {b}", f"{len(row_units)} units"))
        if len(values[-1]) != len(row_units):
            raise ValueError(f"estimator, row {b}: gave {len(values[-1])} numbers for {len(row_units)} units")
    check_finite("estimator,", part.index, values, of="unit")
    return replace(importances, values=values)
