"""Score the spans of completions by an estimator, outside training; and two rules that know nothing of the text."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.research.models import Subject
from cfa_kernels import Batch, Importances, Rows, Span, token_entropies
from cfa_kernels.estimators import Entropy
from cfa_kernels.estimators.base import Estimator
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.packed import PackedForward
from cfa_kernels.text.find import Reasoning


def position(model: Any, batch: Batch) -> Importances:
    """Score units by their place."""
    return Importances([torch.arange(len(units)).float() for units in batch.units])


def length(model: Any, batch: Batch) -> Importances:
    """Score units by their number of tokens."""
    return Importances([torch.tensor([float(unit.end - unit.start) for unit in units]) for units in batch.units])


def judge(
    estimator: Estimator, subject: Subject, rows: Rows, cases: Sequence[Reasoning], *, single: bool = False,
    forward: PackedForward | None = None,
) -> tuple[list[torch.Tensor], int]:  # fmt: skip
    """Importances of the spans of each row, and how many tokens were fed for them, beyond those of a `forward`.

    If `single`, each token of the reasoning is scored by itself, and a span has the mean over its tokens.
    """
    units = [[Span(t, t + 1) for t in range(one.end)] if single else one.spans for one in cases]
    batch = Batch(
        rows, units=units, answers=[one.answer for one in cases], placeholder=subject.tokenizer.pad_token_id,
        reasoning_ends=[one.end for one in cases], seed=(0,),
    )  # fmt: skip
    if isinstance(estimator, Entropy):
        entropies = forward.logprobs(return_entropy=True)[1] if forward else token_entropies(subject.model, rows)
        batch = batch.with_columns(entropies=entropies)
    result = estimator(forward if forward else InProcess(subject.model), batch)
    found = result.values
    if single:
        found = [torch.stack([row[unit.start : unit.end].mean() for unit in one.spans])
                 for one, row in zip(cases, found, strict=True)]  # fmt: skip
    return found, result.work.tokens_fed if result.work else 0
