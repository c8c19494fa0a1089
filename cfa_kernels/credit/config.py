"""Configure how credit is assigned, in parts: an estimator, a rule for weights, rules for spans and for answers.

Each part is a dataclass that declares its options once. A flag, a YAML key and a key of a host's configuration are the
same path: `estimator.samples` is the option `samples` of the part `estimator`.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import yaml

from ..estimators import ESTIMATORS
from ..estimators.base import ANSWER, ENTROPIES, SIBLINGS, TARGETS, Estimator, OwnFunction
from ..options import Count, check_fields, imported
from ..scoring.access import CAPABILITIES
from ..text.rules import AnswerRules, SpanRules
from .presets import NONE, PRESETS, preset_names
from .weights import WEIGHTS, Control, Identity, OwnWeights, WeightRule

PARTS: dict[str, dict[str, Any]] = {"estimator": ESTIMATORS, "weights": WEIGHTS}
"""Parts that are chosen by name, and the names."""


@dataclass(frozen=True)
class CounterfactualConfig:
    """Configuration of credit; by default spans are masked and their drops mapped to a range, after the CF paper.

    A part is an object, a name, or a mapping of its name and options: `Gradient(sigma=0.01)` is
    `{"name": "gradient", "sigma": 0.01}`. Raises `ValueError` for a value that an option does not take, and for an
    option that no chosen part reads; the message names its path.
    """

    estimator: Estimator = "masking"  # type: ignore[assignment]
    """Estimator of the importance of units: a part or name of `ESTIMATORS`, or a function (model, `Batch`) ->
    `Importances`; yours also by "module:name"."""
    weights: WeightRule | None = None
    """Rule that turns importances into weights: a part or name of `WEIGHTS`, or a function, or your
    "module:name". By default that of the estimator's source; None where its values are added to the advantages."""
    control: Control | None = None
    """Control of a comparison: "inverted", high importance gets low weight; "permuted", importances are
    shuffled among the units of a completion; "random", draws replace the importances; "off", all weights are 1. None
    for no control."""
    completions: Literal["all", "positive"] = "all"
    """Completions to score: "all" with an advantage, or those of "positive" advantage; others keep weight 1."""
    units: Literal["spans", "tokens", "turns"] = None  # type: ignore[assignment]
    """Units to score: spans, single tokens, or turns, the runs of 1 in the mask of what the policy wrote; those before
    the answer's marker where an answer is needed, else all. By default as in the estimator's source."""
    target: Literal["answer", "gold"] = "answer"
    """Outcome to score by: the completion's own "answer", or a "gold" answer, the column `targets`. The gold
    answer takes the place of the own one, or follows the completion's end where it has none."""
    spans: SpanRules = None  # type: ignore[assignment]
    """Rules for spans."""
    answers: AnswerRules = None  # type: ignore[assignment]
    """Rules for answers."""
    normalize: Literal["mean"] | None = None
    """\"mean\" rescales each completion's weights to mean 1, unless all are 0; None, as in the CF paper, does not."""
    open_spans: bool = False
    """Weigh each span from its second token on. A span's first token decides which span follows, and weighting it would
    reward that choice itself. So it counts as outside, except in spans of a single token, which keep their weight."""
    token_budget: Count | None = None
    """Maximum packed tokens per forward of credit, or the caller's if that is less; None takes the caller's, else as
    many as half of a GPU's free memory holds, on a CPU a fixed number."""

    def __post_init__(self) -> None:
        estimator = _part("estimator", self.estimator, ESTIMATORS, OwnFunction)
        units = estimator.default_units if self.units is None else self.units
        parts = {
            "estimator": estimator,
            "weights": _weight_rule(self.weights, estimator),
            "control": "off" if self.control is False else self.control,  # as YAML reads an unquoted off
            "units": units,
            "spans": SpanRules() if self.spans is None else _rules("spans", self.spans, SpanRules),
            "answers": AnswerRules() if self.answers is None else _rules("answers", self.answers, AnswerRules),
        }
        has_spans = isinstance(self.spans, Mapping) or self.spans not in (None, SpanRules())
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        check_fields(self)
        masks_observation, takes_all = getattr(estimator, "mask_observation", False), self.control in ("random", "off")
        for holds, sentence in (
            (isinstance(self.weights, Identity) and estimator.negative and not takes_all,
             f"weights='identity' takes no negative importances, which estimator={estimator.name!r} gives"),
            (has_spans and units != "spans", f"spans is not read: with units={units!r} no spans are looked for"),
            (self.open_spans and units != "spans", f"open_spans is not read: with units={units!r} there are no spans"),
            (masks_observation and units != "turns",
             f"estimator.mask_observation is not read: units={units!r} are no turns"),
            (self.target == "gold" and ANSWER not in estimator.needs,
             f"target is not read: estimator={estimator.name!r} reads no answer"),
        ):  # fmt: skip
            if holds:
                raise ValueError(sentence)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "CounterfactualConfig":
        """Build a configuration from options by path, as YAML, flags and Hydra give them.

        `{"estimator": "gradient", "estimator.samples": 4}` is `{"estimator": {"name": "gradient", "samples": 4}}`. What
        is None is not set. `preset` names a preset; a part of another name replaces its part, options alone change it.
        """
        nested = _nested(options)
        if (preset := nested.pop("preset", NONE)) != NONE:
            nested = _merged(_nested(_preset_options(preset)), nested)
        known = [entry.name for entry in fields(cls)]
        for name in (name for name in nested if name not in known):
            owners = [path for path, _, _ in part_options() if path.endswith(f".{name}")]
            remedy = f"; did you mean {owners[0]!r}?" if owners else _near(name, known)
            raise ValueError(f"unknown option {name!r} of credit{remedy}")
        return cls(**nested)

    @classmethod
    def preset(cls, name: str) -> "CounterfactualConfig":
        """Build a configuration that ships, by name (`presets.preset_names`); `ValueError` for an unknown name."""
        return cls.of({"preset": name})

    @property
    def asked_for(self) -> str:
        """Write out the estimator and its options that are not the default, for messages."""
        options = {"estimator": self.estimator.name}
        for entry in fields(self.estimator):  # type: ignore[arg-type]
            if (value := getattr(self.estimator, entry.name)) != entry.default and entry.name != "function":
                options[entry.name] = value
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    @property
    def runs_estimator(self) -> bool:
        """Whether the estimator runs; not where all weights are 1, or drawn and it is not the caller's function."""
        if self.control == "random":  # a function may give signed values, which are then permuted
            return self.weights is None or isinstance(self.estimator, OwnFunction)
        return self.control != "off"

    @property
    def reads_units(self) -> bool:
        """Whether units are looked for: not where all weights are 1 or every token draws its own."""
        draws = self.control == "random" and self.weights is not None
        return self.runs_estimator or (draws and self.weights.token_draws is None)  # type: ignore[union-attr]

    @property
    def continues(self) -> bool:
        """Whether the estimator's queries continue completions that a training forward has fed already."""
        return self.runs_estimator and self.estimator.continues

    @property
    def compares(self) -> bool:
        """Whether the estimator is given every completion of a group, whatever its advantage."""
        return SIBLINGS in self.estimator.needs or isinstance(self.estimator, OwnFunction)

    @property
    def compares_rows(self) -> bool:
        """Whether the credit of a completion depends on others, by the estimator or by the rule for weights."""
        return self.compares or (self.weights is not None and self.weights.compares)

    @property
    def needs(self) -> frozenset[str]:
        """Needs, of `NEEDS`, that a host must meet; none where no estimator runs."""
        if not self.runs_estimator:
            return frozenset()
        own = {SIBLINGS} if self.weights is not None and self.weights.by_group else set()
        return self.estimator.needs | own | ({TARGETS} if self.target == "gold" else set())

    def part_that_needs(self, need: str) -> str:
        """Write out the part with a need, for messages."""
        if self.weights is not None and need == SIBLINGS and need not in self.estimator.needs:
            return f"weights={self.weights.name!r}"
        return "target='gold'" if need == TARGETS else f"estimator={self.estimator.name!r}"

    @property
    def asks_model(self) -> bool:
        """Whether the model is asked anything; a function of the caller's may."""
        return self.runs_estimator and (bool(self.needs & set(CAPABILITIES)) or isinstance(self.estimator, OwnFunction))

    @property
    def reads_entropies(self) -> bool:
        """Whether the entropies of sampled tokens must be given."""
        return ENTROPIES in self.needs


def as_config(credit: Any) -> CounterfactualConfig:
    """Return the configuration that `credit` names: the one rule for what is on and what is off.

    Credit is off (`control="off"`) for None, "none", and a mapping of options, by path, that names neither a preset nor
    an estimator. Raises `TypeError` for anything that is no configuration, name or mapping, `ValueError` as
    `CounterfactualConfig.of`, and for options of credit that is off.
    """
    if isinstance(credit, CounterfactualConfig):
        return credit
    if not (credit is None or isinstance(credit, str | Mapping)):
        raise TypeError(f"credit must be a CounterfactualConfig, a preset's name, or a mapping, got {credit!r}")
    options = _nested(credit if isinstance(credit, Mapping) else {"preset": credit})
    is_off = options.get("preset", NONE) == NONE and "estimator" not in options
    config = CounterfactualConfig.of(options | ({"control": "off"} if is_off else {}))
    read = {"preset", "answers", "token_budget", *(["control"] if options.get("control") in ("off", False) else [])}
    if is_off and (unread := options.keys() - read):
        raise ValueError(f"{min(unread)} is not read: credit is off; name a preset or an estimator")
    return config


def part_options() -> Iterator[tuple[str, type, Any]]:
    """Yield the path of every option of a part, the class that declares it, and its field; once for each class."""
    kinds_of = {name: [*among.values()] for name, among in PARTS.items()}
    for name, kinds in {**kinds_of, "spans": [SpanRules], "answers": [AnswerRules]}.items():
        yield from ((f"{name}.{entry.name}", kind, entry) for kind in kinds for entry in fields(kind))


def _preset_options(name: str) -> dict[str, Any]:
    if name not in (names := preset_names()):
        raise ValueError(f"credit must be {NONE!r} or one of {', '.join(names)}, got {name!r}{_near(name, names)}")
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text("utf-8"))


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nest options by path, named parts and their options in a mapping each; what is None is not set."""
    nested: dict[str, Any] = {}
    for path, value in options.items():
        name, dot, option = str(path).partition(".")
        own = {option: value} if dot else {"name": value} if name in PARTS and isinstance(value, str) else value
        if isinstance(own, Mapping):
            if not isinstance(before := nested.get(name, {}), Mapping):
                raise ValueError(f"{path}: {name} is given as an object; set the option there")
            own = {**before, **{key: one for key, one in own.items() if one is not None}}
        if own is not None and own != {}:
            nested[name] = own
    return nested


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Change options: a part of another name replaces the one before it, options alone change it."""
    merged = {**before, **after}
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        both = isinstance(old, Mapping) and isinstance(new, Mapping)
        if both and new.get("name", old.get("name")) == old.get("name"):
            merged[name] = {**old, **new}
    return merged


def _part(path: str, value: Any, among: Mapping[str, Any], own: type, usual: str | None = None) -> Any:
    """Resolve a part given by name, `module:name`, class, object or mapping; a function becomes an `own` part."""
    kind: Any = own.__bases__[0]  # of a part, registered or not
    options: dict[str, Any] = {}
    if isinstance(value, Mapping):
        options = dict(value)
        value = options.pop("name", usual or next(iter(among)))
    if isinstance(value, str) and ":" in value:
        value = imported(path, value)
    if isinstance(value, str) and value in among:
        value = among[value]
    if isinstance(value, type) and issubclass(value, kind):
        _refuse_unread(path, f"{path}={getattr(value, 'name', '')!r}", options, value)
        return value(**options)
    if options:
        raise ValueError(f"{path}.{next(iter(options))}: {value!r} has no options; omit it")
    if isinstance(value, kind):
        return value
    if callable(value):
        return own(value)
    near = _near(value, among) if isinstance(value, str) else ""
    raise ValueError(f"{path} must be a function, 'module:name' or one of {', '.join(among)}, got {value!r}{near}")


def _weight_rule(weights: Any, estimator: Estimator) -> WeightRule | None:
    if (usual := estimator.weights) is not None:
        return _part("weights", usual if weights is None else weights, WEIGHTS, OwnWeights, usual)
    if weights is not None:
        name = weights.get("name", weights) if isinstance(weights, Mapping) else weights
        raise ValueError(f"weights={name!r} is not read: estimator={estimator.name!r} is signed, it adds to advantages")
    return None


def _rules(path: str, value: Any, kind: type) -> Any:
    if isinstance(value, Mapping):
        _refuse_unread(path, path, value, kind)
        return kind(**value)
    return value


def _refuse_unread(path: str, chosen: str, options: Iterable[str], kind: Any) -> None:
    """Raise `ValueError` naming the first option that the chosen part does not declare, and the parts that do."""
    own = [entry.name for entry in fields(kind)]
    for name in (name for name in options if name not in own):
        parts = PARTS.get(path, {})
        readers = [reader for reader, part in parts.items() if name in (entry.name for entry in fields(part))]
        remedy = f"; it is an option of {', '.join(readers)}" if readers else _near(name, own)
        raise ValueError(f"{path}.{name} is not read: {chosen} has {', '.join(own) or 'no options'}{remedy}")


def _near(name: str, among: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [*among], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
