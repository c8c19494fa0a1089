"""Counterfactual credit assignment for language-model reinforcement learning, nearly free.

Mask a span of the reasoning, measure how the log-probability of the answer moves, weigh each token's clipped policy
loss by that. The names below are the public API; everything else may change.
"""

from .answer_text import answer_text_span
from .credit import Credit, counterfactual_credit, counterfactual_weights
from .credit_config import CounterfactualConfig
from .estimators import CreditBatch, Importances
from .losses import contributing_rows, linear_policy_loss, logits_policy_loss, policy_loss
from .ops.linear_logprob import linear_logprob
from .packed_loss import PackedLoss, packed_logprobs, packed_policy_loss
from .prefix_values import Probe
from .reshaping import span_weights
from .scoring import CounterfactualScores, ScoringWork, score_counterfactuals
from .spans import Span, detect_spans, find_answer

__version__ = "0.1.0"

__all__ = [
    "CounterfactualConfig",
    "CounterfactualScores",
    "Credit",
    "CreditBatch",
    "Importances",
    "PackedLoss",
    "Probe",
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
