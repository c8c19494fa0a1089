"""Counterfactual credit assignment for the reinforcement learning of language models.

Mask a span of the reasoning, measure how the log-probability of the answer moves, weigh each token's clipped policy
loss by that. The names below are the public API; everything else may change. Each is imported when it is first used,
so that `import cfa_kernels` brings neither torch nor transformers, and kernels and losses do without transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `_PUBLIC` once more, for type checkers and editors
    from .credit.assign import Credit as Credit
    from .credit.assign import counterfactual_credit as counterfactual_credit
    from .credit.assign import counterfactual_weights as counterfactual_weights
    from .credit.config import AnswerRules as AnswerRules
    from .credit.config import CounterfactualConfig as CounterfactualConfig
    from .credit.config import SpanRules as SpanRules
    from .credit.deferred import DeferredCredit as DeferredCredit
    from .credit.deferred import Draws as Draws
    from .credit.deferred import credited_advantages as credited_advantages
    from .credit.deferred import token_entropies as token_entropies
    from .credit.loss import CreditedLoss as CreditedLoss
    from .credit.loss import credited_loss as credited_loss
    from .credit.weights import Bilevel as Bilevel
    from .credit.weights import Identity as Identity
    from .credit.weights import OwnWeights as OwnWeights
    from .credit.weights import Range as Range
    from .credit.weights import TopShare as TopShare
    from .credit.weights import span_weights as span_weights
    from .estimators.base import Estimator as Estimator
    from .estimators.base import Importances as Importances
    from .estimators.base import OwnFunction as OwnFunction
    from .estimators.entropy import Entropy as Entropy
    from .estimators.entropy import EntropyShaping as EntropyShaping
    from .estimators.external import External as External
    from .estimators.gradient import Gradient as Gradient
    from .estimators.masking import Masking as Masking
    from .estimators.prefix_gain import PrefixGain as PrefixGain
    from .estimators.probes import Probe as Probe
    from .estimators.siblings import PrefixTreeValues as PrefixTreeValues
    from .estimators.siblings import SiblingEdits as SiblingEdits
    from .integrations.credit import fold_weights as fold_weights
    from .loss.policy import contributing_rows as contributing_rows
    from .loss.policy import linear_policy_loss as linear_policy_loss
    from .loss.policy import logits_policy_loss as logits_policy_loss
    from .loss.policy import policy_loss as policy_loss
    from .loss.ragged import LossBatch as LossBatch
    from .model.check.accuracy import noise_floor as noise_floor
    from .model.check.verify import check_model as check_model
    from .model.compile_layers import compile_layers as compile_layers
    from .model.run_inside import run_inside as run_inside
    from .ops.kept_tokens import KeptTokens as KeptTokens
    from .ops.linear_logprob import linear_logprob as linear_logprob
    from .rows import Rows as Rows
    from .rows import pad_rows as pad_rows
    from .scoring.access import InProcess as InProcess
    from .scoring.access import LogprobService as LogprobService
    from .scoring.access import ModelAccess as ModelAccess
    from .scoring.access import Sharded as Sharded
    from .scoring.access import TrainingForward as TrainingForward
    from .scoring.batch import ScoredBatch as ScoredBatch
    from .scoring.masked import CounterfactualScores as CounterfactualScores
    from .scoring.masked import ScoringWork as ScoringWork
    from .scoring.masked import score_counterfactuals as score_counterfactuals
    from .scoring.packed import PackedForward as PackedForward
    from .scoring.packed import PackedLoss as PackedLoss
    from .scoring.packed import packed_forward as packed_forward
    from .scoring.packed import packed_logprobs as packed_logprobs
    from .scoring.packed import packed_policy_loss as packed_policy_loss
    from .span import Span as Span
    from .text.answers import answer_text_span as answer_text_span
    from .text.find import detect_spans as detect_spans
    from .text.find import find_answer as find_answer

__version__ = "0.1.0"

_PUBLIC = {
    "credit.assign": "Credit counterfactual_credit counterfactual_weights",
    "credit.deferred": "DeferredCredit Draws credited_advantages token_entropies",
    "credit.config": "AnswerRules CounterfactualConfig SpanRules",
    "credit.loss": "CreditedLoss credited_loss",
    "credit.weights": "Bilevel Identity OwnWeights Range TopShare span_weights",
    "estimators.base": "Estimator Importances OwnFunction",
    "estimators.entropy": "Entropy EntropyShaping",
    "estimators.external": "External",
    "estimators.gradient": "Gradient",
    "estimators.masking": "Masking",
    "estimators.prefix_gain": "PrefixGain",
    "estimators.probes": "Probe",
    "estimators.siblings": "PrefixTreeValues SiblingEdits",
    "model.run_inside": "run_inside",
    "model.check.accuracy": "noise_floor",
    "model.compile_layers": "compile_layers",
    "model.check.verify": "check_model",
    "integrations.credit": "fold_weights",
    "loss.ragged": "LossBatch",
    "loss.policy": "contributing_rows linear_policy_loss logits_policy_loss policy_loss",
    "ops.kept_tokens": "KeptTokens",
    "ops.linear_logprob": "linear_logprob",
    "rows": "Rows pad_rows",
    "scoring.access": "InProcess LogprobService ModelAccess Sharded TrainingForward",
    "scoring.batch": "ScoredBatch",
    "scoring.masked": "CounterfactualScores ScoringWork score_counterfactuals",
    "scoring.packed": "PackedForward PackedLoss packed_forward packed_logprobs packed_policy_loss",
    "span": "Span",
    "text.answers": "answer_text_span",
    "text.find": "detect_spans find_answer",
}
"""The public names by the module that each is imported from."""

_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
_PACKAGES = sorted({module.partition(".")[0] for module in _PUBLIC} | {"tree"})

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name, or a package, when it is first used."""
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
