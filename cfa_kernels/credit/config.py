"""How credit is assigned, as one object: the estimator, the units, what is watched, and the way to weights."""

from dataclasses import dataclass
from numbers import Real

from ..estimators.base import Estimator, EstimatorKind
from ..estimators.registry import APPROXIMATIONS, ESTIMATORS, SELECTORS
from ..scoring.outcomes import DIVERGENCES, OUTCOMES
from ..text.answers import AnswerFormat, check_answer_options
from ..text.find import Detector, checked_span_options
from .weights import Reshape, check_mode, check_range

UNITS = ("spans", "tokens")
EFFECTS = ("direct", "total")
FILLS = ("placeholder", "resampled")
RESHAPINGS = ("range", "bilevel", "top", "identity")

_NUMBERS = (
    "w_min", "w_max", "w_answer", "tau", "boost", "floor", "fraction", "preselect", "sigma", "correct_threshold",
)  # fmt: skip
_MASKING_DEFAULTS = {"effect": "direct", "fill": "placeholder", "approximation": None, "preselect": 1.0}


@dataclass(frozen=True)
class CounterfactualConfig:
    """How credit is assigned; the defaults are the CF paper's. Raises `ValueError` naming a bad field."""

    mode: str = "counterfactual"
    """counterfactual, or a control: inverted (high importance gets low weight), random, uniform (all weights 1)."""
    estimator: str | Estimator = "masking"
    """What finds the importance of a unit: a name in `ESTIMATORS`, or a function (model, `CreditBatch`) ->
    `Importances`."""
    units: str | None = None
    """What is judged as one: "spans" (of `detector`), or "tokens", each by itself: those before the answer's marker
    where an answer is needed, else all. None takes what the estimator's source does."""
    outcome: str | None = None
    """What masking and gradient watch: "logprob" or "mean_logprob" of the answer, or the distribution of its first
    token ("last") or of its mean logits ("mean"). None takes what the estimator's source does."""
    reshape: str | Reshape | None = None
    """How importances become weights: "range" (w_min, w_max, w_answer), "bilevel" (tau, boost, floor), "top"
    (fraction), "identity", or a function. None takes what the estimator's source does."""
    w_min: float = 0.5
    """Weight of the least important span of a completion."""
    w_max: float = 4.0
    """Weight of its most important span."""
    w_answer: float = 1.5
    """Weight of the answer's tokens under "range"."""
    tau: float = 0.4
    """Quantile of a completion's importances below which "bilevel" suppresses."""
    boost: float = 2.0
    """How much more than at the threshold the most important token weighs under "bilevel", before the rescaling."""
    floor: float = 0.0
    """Least weight under "bilevel", before the rescaling."""
    fraction: float = 0.2
    """Share of the tokens of the batch that "top" keeps."""
    effect: str = "direct"
    """Of a masked unit: "direct", what the answer loses while all later text stays as it was written, or "total", also
    what it loses through later units that would not have come out as they did, see `total_effects`. Total effects are
    exact, of the answer's log-prob, with placeholders."""
    fill: str = "placeholder"
    """What stands in place of a masked unit: "placeholder", or "resampled", what the model itself might have written
    there, see `resampled_fills`."""
    approximation: str | None = None
    """Of masking: None masks exactly, "short_branches" computes anew only the unit and the rows from the marker on,
    "knockout" hides the unit from the rows from the marker on. They say less of effects that pass through later steps.
    """
    preselect: float = 1.0
    """Share of each completion's units that masking masks, at least one; the others count as 0. 1 masks all."""
    cheap: str = "length"
    """What chooses that share: "length", "first", "last", one of the approximations, or another estimator that needs
    an answer, or "entropy"."""
    sigma: float = 1e-3
    """Standard deviation of the noise under "gradient", in the embeddings' own scale; 0 for plain gradient x input."""
    samples: int = 1
    """Draws to average, of that noise or of "resampled" units."""
    correct_threshold: float = 0.5
    """A completion with at least this reward counts as correct, for "ktae" and "sibling_edits"."""
    normalize: str | None = None
    """\"mean\" rescales each completion's weights to mean 1, unless all are 0; None, as in the CF paper, does not."""
    detector: str | Detector = "math"
    """What counts as a span, see `detect_spans`."""
    max_spans: int = 10
    """Most spans per completion (K_max)."""
    selection: str = "first"
    """Which spans stay when there are more, see `detect_spans`."""
    answer_format: AnswerFormat | None = None
    """The run's own form of answers, a pattern or a function, see `answer_text_span`; None knows the usual forms."""
    answer_fallback: str | None = None
    """\"last_number\" takes the last number where no answer is marked; None takes nothing."""
    placeholder_id: int | None = None
    """Id that replaces masked tokens; None takes the tokenizer's pad token, else its end-of-text token."""
    token_budget: int | None = None
    """Most tokens per packed forward; None by free memory."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name} must be a number, got {value!r:.60}")
            if isinstance(value, int) and abs(value) > 10**38:
                raise ValueError(f"{name} must be a number that float32 holds, got a larger integer")
        for name, least in (("placeholder_id", 0), ("token_budget", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be None or an integer of at least {least}, got {value!r}")
        check_mode(self.mode, self.normalize)
        check_range(self.w_min, self.w_max, self.w_answer)
        checked_span_options(self.detector, self.max_spans, self.selection)
        check_answer_options(self.answer_format, self.answer_fallback)
        for name, among in (("estimator", tuple(ESTIMATORS)), ("reshape", RESHAPINGS)):
            value = getattr(self, name)
            if not callable(value) and value not in among and (name == "estimator" or value is not None):
                raise ValueError(f"{name} must be a function or one of {', '.join(among)}, got {value!r}")
        for name, among in (("units", UNITS), ("outcome", OUTCOMES), ("approximation", APPROXIMATIONS)):
            if getattr(self, name) not in (None, *among):
                raise ValueError(f"{name} must be one of {', '.join(among)}, got {getattr(self, name)!r}")
        for name, among in (("effect", EFFECTS), ("fill", FILLS), ("cheap", SELECTORS)):
            if getattr(self, name) not in among:
                raise ValueError(f"{name} must be one of {', '.join(among)}, got {getattr(self, name)!r}")
        if not 0 < self.preselect <= 1:
            raise ValueError(f"preselect must be in (0, 1], got {self.preselect}")
        if self.approximation is not None and self.fill != "placeholder":
            raise ValueError(f"fill={self.fill!r} cannot be combined with approximation={self.approximation!r}")
        for name in ("tau", "floor", "fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not abs(self.correct_threshold) < float("inf"):
            raise ValueError(f"correct_threshold must be finite, got {self.correct_threshold}")
        for name in ("boost", "sigma"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples must be an integer of at least 1, got {self.samples!r}")
        if self.outcome is not None and "outcome" not in self.kind.options:
            raise ValueError(f"outcome: estimator={self.estimator!r} watches none, got {self.outcome!r}")
        for name, default in _MASKING_DEFAULTS.items():
            if getattr(self, name) != default and name not in self.kind.options:
                raise ValueError(f"{name}: estimator={self.estimator!r} masks nothing, got {getattr(self, name)!r}")
        if self.reshape == "identity" and self.mode in ("counterfactual", "inverted") and self._may_be_negative:
            raise ValueError(
                f"reshape='identity' takes importances for weights, and estimator={self.estimator!r} gives negative "
                "ones; take 'range', 'bilevel', 'top' or a function"
            )
        if self.kind.signed and self.reshape not in (None, "identity"):
            raise ValueError(
                f"reshape: estimator={self.estimator!r} adds to the advantages, which nothing reshapes, "
                f"got {self.reshape!r}"
            )
        if self.effect == "total":
            for name, needed in {**_MASKING_DEFAULTS, "effect": "total", "outcome": self.outcome and "logprob"}.items():
                if getattr(self, name) != needed:
                    raise ValueError(f"{name}={getattr(self, name)!r} cannot be combined with effect='total'")

    @property
    def _may_be_negative(self) -> bool:
        in_nats = self.estimator == "masking" and self.outcome not in DIVERGENCES
        return in_nats or self.estimator == "prefix_gain"

    @property
    def exact(self) -> bool:
        """Whether masking is one call of `score_counterfactuals`: every unit, by placeholders, the answer alone."""
        return all(getattr(self, name) == default for name, default in _MASKING_DEFAULTS.items())

    @property
    def reads_entropies(self) -> bool:
        """Whether the entropies of sampled tokens must be given."""
        read = "entropy" in (self.estimator, self.cheap if self.preselect < 1 else None)
        return read and self.mode in ("counterfactual", "inverted")

    @property
    def kind(self) -> EstimatorKind:
        """How the estimator is called; a function judges spans, and is given every completion of the batch."""
        if callable(self.estimator):
            return EstimatorKind(self.estimator, "spans", "range", False, True, True)
        return ESTIMATORS[self.estimator]
