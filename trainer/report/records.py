"""Make records of completions with their credit, one JSON object a line; `docs/analysis.md` has the fields."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from cfa_kernels.credit.weights import unit_weight
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.text.offsets import decoded

from ..config import TrainConfig
from ..state import Step

_TEXTS = {"question": "question", "reference": "answer"}  # columns of the data


def completion_record(result: Step, b: int, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> dict[str, Any]:
    """Record completion `b` of a step, with the unit of its spans' drops."""
    batch, credit, estimator = result.batch, result.credit, config.counterfactual().estimator
    row, ids, answer = batch.rows[b], batch.rollouts.ids()[b], credit.answers[b]
    unit = f"importance by {estimator.name}"
    if isinstance(estimator, Masking) and estimator.outcome in ("logprob", "mean_logprob"):
        unit = "nats"
    spans = []
    for span, drop in zip(credit.spans[b], credit.drop[b].tolist()):  # noqa: B905  # no drops where weights are drawn
        text, weight = decoded(ids[span.start : span.end], tokenizer), unit_weight(credit.weights[b], span)
        drop = round(drop, 4) + 0.0 if isinstance(estimator, Masking) else drop  # + 0.0: no -0.0
        spans.append({"start": span.start, "end": span.end, "text": text, "drop": drop, "weight": weight})
    counted = not (batch.rollouts.truncated[b] and config.mask_truncated_completions)
    names = {"counterfactual": estimator.name} | {c: f"{estimator.name}, {c}" for c in ("inverted", "permuted")}
    record: dict[str, Any] = {
        "problem": batch.problems[b],
        "completion": batch.rollouts.texts[b],
        "reward": batch.rewards[b].item(),
        "advantage": result.advantages[b].item(),
        "truncated": bool(batch.rollouts.truncated[b]),
        "counted": counted,
        "uncredited": _why_uncredited(result, b, config, counted=counted),
        "tokens": [decoded([i], tokenizer) for i in ids],
        **{name: str(row[column]) for name, column in _TEXTS.items() if column in row},
        "drops_unit": unit,
        "answer": None if answer is None else {"start": answer.start, "end": answer.end},
        "spans": spans,
        "credit": names.get(config.credit, config.credit),
        "weights": _rounded(credit.weights[b].tolist()),
    }
    if credit.advantages is not None:
        record["estimators"] = {estimator.name: {"advantages": _rounded(credit.advantages[b].tolist())}}
    return record


def _why_uncredited(result: Step, b: int, config: TrainConfig, *, counted: bool) -> str | None:
    """Say why all tokens of a completion have weight 1; None if some have not."""
    credit, advantage = result.credit, result.advantages[b].item()
    shades = credit.weights[b] if credit.advantages is None else credit.advantages[b] - advantage + 1
    reasons = {
        "it was cut off at the length limit, and the loss omits it": not counted,
        "it has no advantage: all completions of its group have one reward": advantage == 0,
        f"credit={config.credit} gives every token the same weight": config.credit == "uniform",
        "it is wrong, and completions=positive gives credit to completions with a positive advantage": (
            config.counterfactual().completions == "positive" and advantage < 0
        ),
        "no answer was found in it": credit.answers[b] is None and not credit.spans[b],
        "no span was found before its answer": not credit.spans[b],
        "its spans do not differ in importance": True,
    }
    is_uniform = bool((shades == 1).all())
    return next(reason for reason, holds in reasons.items() if holds) if is_uniform else None


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
