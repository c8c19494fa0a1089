"""Make records of completions with their credit, one JSON object a line; `docs/analysis.md` has the fields."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from cfa_kernels.credit.weights import unit_weight
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.text.offsets import decoded

from ..config import TrainConfig
from ..metrics import Step

_TEXTS = {"question": "question", "reference": "answer"}  # columns of the data


def completion_record(result: Step, b: int, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> dict[str, Any]:
    """Record completion `b` of a step, with the unit of its spans' drops."""
    batch, credit, estimator = result.batch, result.credit, config.counterfactual().estimator
    row, ids, answer = batch.rows[b], batch.rollouts.ids()[b], credit.answers[b]
    unit = f"importance by {estimator.name}"
    if isinstance(estimator, Masking) and estimator.outcome in ("logprob", "mean_logprob"):
        unit = "nats" if estimator.effect == "direct" else "total effect in nats"
    spans = []
    for span, drop in zip(credit.spans[b], credit.drop[b].tolist()):  # noqa: B905  # no drops where weights are drawn
        text, weight = decoded(ids[span.start : span.end], tokenizer), unit_weight(credit.weights[b], span)
        drop = round(drop, 4) + 0.0 if isinstance(estimator, Masking) else drop  # + 0.0: no -0.0
        spans.append({"start": span.start, "end": span.end, "text": text, "drop": drop, "weight": weight})
    names = {"counterfactual": estimator.name} | {c: f"{estimator.name}, {c}" for c in ("inverted", "permuted")}
    record: dict[str, Any] = {
        "problem": batch.problems[b],
        "completion": batch.rollouts.texts[b],
        "reward": batch.rewards[b].item(),
        "advantage": result.advantages[b].item(),
        "truncated": bool(batch.rollouts.truncated[b]),
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


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
