"""Counterfactual credit assignment for language-model reinforcement learning, nearly free.

Mask a span of the reasoning, measure how the log-probability of the answer moves, weigh each token's clipped policy
loss by that. The names below are the public API; everything else may change.
"""

from .credit.assign import Credit, counterfactual_credit, counterfactual_weights
from .credit.config import CounterfactualConfig
from .credit.weights import span_weights
from .estimators.base import Importances
from .estimators.probes import Probe
from .losses.policy import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss
from .ops.linear_logprob import linear_logprob
from .scoring.batch import ScoredBatch
from .scoring.masked import CounterfactualScores, ScoringWork, score_counterfactuals
from .scoring.training_forward import PackedLoss, packed_logprobs, packed_policy_loss
from .span import Span
from .text.answers import answer_text_span
from .text.find import detect_spans, find_answer

__version__ = "0.1.0"

__all__ = [
    "CounterfactualConfig",
    "CounterfactualScores",
    "Credit",
    "Importances",
    "PackedLoss",
    "Probe",
    "ScoredBatch",
    "ScoringWork",
    "Span",
    "answer_text_span",
    "contributing_rows",
    "counterfactual_credit",
    "counterfactual_weights",
    "detect_spans",
    "find_answer",
    "linear_logprob",
    "linear_policy_loss",
    "logits_policy_loss",
    "packed_logprobs",
    "packed_policy_loss",
    "policy_loss",
    "score_counterfactuals",
    "span_weights",
]
