"""Make records of completions with their credit, one JSON object a line; `docs/analysis.md` has the fields."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from cfa_kernels import CounterfactualConfig, Credit
from cfa_kernels.estimators.masking import Masking

from ..rollouts import Rollouts

Record = dict[str, Any]


def completion_record(
    rollouts: Rollouts, b: int, tokenizer: PreTrainedTokenizerBase, *, problem: int, reward: float, advantage: float
) -> Record:
    """Record completion `b` of a batch, before any credit."""
    return {
        "problem": problem, "completion": rollouts.texts[b], "reward": reward, "advantage": advantage,
        "truncated": bool(rollouts.truncated[b]), "tokens": [tokenizer.decode([i]) for i in rollouts.ids()[b]],
    }  # fmt: skip


def token_credit(credit: Credit, i: int) -> dict[str, list[float]]:
    """Return the `advantages` of the tokens of completion `i` of a batch if credit is signed, else their `weights`."""
    kind = "weights" if credit.advantages is None else "advantages"
    return {kind: rounded(getattr(credit, kind)[i].tolist())}


def judged_spans(
    credit: Credit, i: int, ids: list[int], tokenizer: PreTrainedTokenizerBase, config: CounterfactualConfig
) -> Record:
    """Collect answer and judged spans of completion `i` of a batch, with the unit of the spans' drops."""
    unit, estimator = f"importance by {config.estimator.name}", config.estimator
    if isinstance(estimator, Masking) and estimator.outcome in ("logprob", "mean_logprob"):
        unit = "nats" if estimator.effect == "direct" else "total effect in nats"
    answer = credit.answers[i]
    spans = []
    for span, drop in zip(credit.spans[i], credit.drop[i].tolist(), strict=True):
        text, weight = tokenizer.decode(ids[span.start : span.end]), credit.weights[i][span.start].item()
        drop = round(drop, 4) + 0.0 if isinstance(estimator, Masking) else drop  # + 0.0: no -0.0
        spans.append({"start": span.start, "end": span.end, "text": text, "drop": drop, "weight": weight})
    return {
        "drops_unit": unit,
        "answer": None if answer is None else {"start": answer.start, "end": answer.end},
        "spans": spans,
    }


def rounded(values: list[float]) -> list[float]:
    """Round to the four decimals of a record."""
    return [round(value, 4) for value in values]
