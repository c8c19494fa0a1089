"""The settings of credit, as flags and YAML give them: which estimator, which reshaping, which units.

Where it stands: a part of `TrainConfig`. `counterfactual` turns them into what the library takes.
"""

from dataclasses import dataclass
from typing import Any, Literal

from cfa_kernels import CounterfactualConfig
from trainer.rewards import load_answer_format


@dataclass
class CreditSettings:
    """How credit is spread over the tokens of a completion. Defaults are the CF paper's."""

    credit: Literal["counterfactual", "inverted", "random", "uniform"] = "counterfactual"
    """How credit is spread over tokens: by importance, its inverse, at random, or evenly (DAPO)."""
    estimator: Literal["masking", "gradient", "prefix_gain", "entropy", "prefix_tree", "ktae", "sibling_edits"] = (
        "masking"
    )
    """What finds the importance of a unit: masking it, gradients at the embeddings, the answer's value after each step,
    the entropy it was drawn with, or a comparison of the group's completions."""
    units: Literal["auto", "spans", "tokens"] = "auto"
    """What is judged as one; auto is what the estimator's source does."""
    outcome: Literal["auto", "logprob", "mean_logprob", "last", "mean"] = "auto"
    """What masking and gradients watch: the answer's log-prob, its mean over tokens, or by KL divergence the
    distribution of its first token (last) or of its mean logits (mean). Auto is what the source does."""
    reshape: Literal["auto", "range", "bilevel", "top", "identity"] = "auto"
    """How importances become weights; auto is what the estimator's source does."""
    tau: float = 0.4
    """Quantile of a completion's importances below which bilevel suppresses."""
    boost: float = 2.0
    """How much more than at the threshold the most important token weighs under bilevel, before the rescaling."""
    floor: float = 0.0
    """Least weight under bilevel, before the rescaling."""
    fraction: float = 0.2
    """Share of a micro-batch's tokens that top keeps."""
    effect: Literal["direct", "total"] = "direct"
    """Of a masked unit: what the answer loses while all later text stays as it was written, or also what it loses
    through later units that would not have come out as they did."""
    fill: Literal["placeholder", "resampled"] = "placeholder"
    """What stands in place of a masked unit: placeholders, or what the model itself might have written there."""
    approximation: Literal["none", "short_branches", "knockout"] = "none"
    """Of masking: compute anew only the unit and the rows from the marker on, or hide the unit from those rows."""
    preselect: float = 1.0
    """Share of a completion's units that is masked, by the cheap estimate; 1 masks all."""
    cheap: Literal["length", "first", "last", "short_branches", "knockout", "prefix_gain", "gradient", "entropy"] = (
        "length"
    )
    """What chooses that share."""
    sigma: float = 0.001
    """Standard deviation of the noise on embeddings under gradient; 0 for plain gradient times input."""
    samples: int = 1
    """Draws to average, of that noise or of resampled units."""
    correct_threshold: float = 0.5
    """Completions with at least this reward count as correct."""
    w_min: float = 0.5
    """Weight of the least important span of a completion."""
    w_max: float = 4.0
    """Weight of the most important span of a completion."""
    w_answer: float = 1.5
    """Weight of the answer's tokens."""
    max_spans: int = 10
    """Most spans masked per completion, each at the cost of one branch."""
    span_selection: Literal["first", "longest", "even", "last"] = "first"
    """Which spans are kept when a completion has more than max_spans."""
    detector: Literal["math", "latex", "python", "sentence"] = "math"
    """What counts as a span: arithmetic, formulas or statements of a program, then other text; or sentences."""
    answer_format: str | None = None
    """How completions give their answer, for rewards, credit and evaluation alike: a regular expression with one group
    or a group "answer", or "module:function" from a text to (start, end) or None. By default the usual forms."""
    answer_fallback: Literal["none", "last_number"] = "none"
    """What counts as the answer where none is marked."""
    normalize_weights: Literal["none", "mean"] = "none"
    """"mean" rescales each completion's weights to mean 1; the paper does not."""
    token_budget: int | None = None
    """Most rows of a packed forward, in the update and of masked branches; a group that is larger gets a forward of its
    own. By default what half of the free memory holds."""

    @property
    def estimates(self) -> bool:
        """Whether importances are looked for."""
        return self.credit in ("counterfactual", "inverted")

    @property
    def masks_answers(self) -> bool:
        """Whether they come from masked answers alone, for which a training forward's keys and values are continued."""
        return self.estimates and self.estimator == "masking" and self.counterfactual().exact

    @property
    def continues_forward(self) -> bool:
        """Whether importances are read from rows that continue a training forward's keys and values."""
        chained = self.estimator == "masking" and self.effect == "total"
        return self.masks_answers or (self.estimates and (chained or self.estimator == "prefix_gain"))

    @property
    def reads_entropies(self) -> bool:
        """Whether the entropies of sampled tokens are needed."""
        return self.counterfactual().reads_entropies

    def counterfactual(self) -> CounterfactualConfig:
        """The settings that the kernels take."""
        return CounterfactualConfig(
            mode=self.credit,
            estimator=self.estimator,
            units=_unless_auto(self.units),
            outcome=_unless_auto(self.outcome),
            reshape=_unless_auto(self.reshape),
            tau=self.tau,
            boost=self.boost,
            floor=self.floor,
            fraction=self.fraction,
            effect=self.effect,
            fill=self.fill,
            approximation=None if self.approximation == "none" else self.approximation,
            preselect=self.preselect,
            cheap=self.cheap,
            sigma=self.sigma,
            samples=self.samples,
            correct_threshold=self.correct_threshold,
            w_min=self.w_min,
            w_max=self.w_max,
            w_answer=self.w_answer,
            normalize=None if self.normalize_weights == "none" else self.normalize_weights,
            detector=self.detector,
            max_spans=self.max_spans,
            selection=self.span_selection,
            token_budget=self.token_budget,
            **self.answer_options(),
        )

    def answer_options(self) -> dict[str, Any]:
        """The run's own form of answers, as `answer_text_span` takes it."""
        return {
            "answer_format": load_answer_format(self.answer_format),
            "answer_fallback": None if self.answer_fallback == "none" else self.answer_fallback,
        }


def _unless_auto(choice: str) -> str | None:
    return None if choice == "auto" else choice
