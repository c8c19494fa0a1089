"""Configure how credit is assigned, in parts: an estimator, a rule for weights, rules for spans and for answers.

Each part declares its fields once; flags, YAML, hosts and `docs/credit.md` derive from them by their flat names.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import yaml

from ..estimators import ESTIMATORS
from ..estimators.base import ANSWER, ENTROPIES, SIBLINGS, TARGETS, Estimator, OwnFunction
from ..options import Count, check_fields, imported
from ..scoring.access import CAPABILITIES
from ..text.rules import AnswerRules, SpanRules
from .presets import PRESETS, preset_names
from .weights import WEIGHTS, Control, Identity, OwnWeights, WeightRule


class UnreadOptions(ValueError):
    """Options, by `names`, that none of the chosen parts reads."""

    def __init__(self, names: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.names = names


@dataclass(frozen=True, init=False)
class CounterfactualConfig:
    """Configuration of credit; by default spans are masked and their drops mapped to a range, after the CF paper.

    Each part is an object, or a name with the part's options as flat keywords:
    `CounterfactualConfig(Gradient(sigma=0.01))` is `CounterfactualConfig(estimator="gradient", sigma=0.01)`.
    Raises `ValueError` for a value that an option does not take, `UnreadOptions` for those that no chosen part reads.
    """

    estimator: Estimator
    """Estimator of the importance of units: a part or name of `ESTIMATORS`, or a function (model, `Batch`) ->
    `Importances`; yours also by "module:name"."""
    weights: WeightRule | None
    """Rule that turns importances into weights: a part or name of `WEIGHTS`, or a function, or your
    "module:name". By default that of the estimator's source; None where its values are added to the advantages."""
    control: Control | None
    """Control of a comparison: "inverted", high importance gets low weight; "permuted", importances are
    shuffled among the units of a completion; "random", draws replace the importances; "off", all weights are 1. None
    for no control."""
    completions: Literal["all", "positive"]
    """Completions to score: "all" with an advantage, or those of "positive" advantage; others keep weight 1."""
    units: Literal["spans", "tokens", "turns"]
    """Units to score: spans, single tokens, or turns, the runs of 1 in the mask of what the policy wrote; those before
    the answer's marker where an answer is needed, else all. By default as in the estimator's source."""
    target: Literal["answer", "gold"]
    """Outcome to score by: the completion's own "answer", or a "gold" answer, the column `targets`. The gold
    answer takes the place of the own one, or follows the completion's end where it has none."""
    spans: SpanRules
    """Rules for spans."""
    answers: AnswerRules
    """Rules for answers."""
    normalize: Literal["mean"] | None
    """\"mean\" rescales each completion's weights to mean 1, unless all are 0; None, as in the CF paper, does not."""
    open_spans: bool
    """Weigh each span from its second token on. A span's first token decides which span follows, and weighting it would
    reward that choice itself. So it counts as outside, except in spans of a single token, which keep their weight."""
    token_budget: Count | None
    """Maximum packed tokens per forward of credit, or the caller's if that is less; None takes the caller's, else as
    many as half of a GPU's free memory holds, on a CPU a fixed number."""

    def __init__(
        self,
        estimator: str | Estimator | Callable[..., Any] = "masking",
        weights: str | WeightRule | Callable[..., Any] | None = None,
        control: Control | None = None,
        *,
        completions: Literal["all", "positive"] = "all",
        units: Literal["spans", "tokens", "turns"] | None = None,
        target: Literal["answer", "gold"] = "answer",
        spans: SpanRules | None = None,
        answers: AnswerRules | None = None,
        normalize: Literal["mean"] | None = None,
        open_spans: bool = False,
        token_budget: int | None = None,
        **flat: Any,
    ) -> None:
        chosen = _named("estimator", estimator, ESTIMATORS, OwnFunction, flat)
        control = "off" if control is False else control  # YAML reads an unquoted off as False
        rule = _weight_rule(weights, chosen, flat)
        units = chosen.default_units if units is None else units  # type: ignore[assignment]
        parts: dict[str, Any] = {
            "estimator": chosen,
            "weights": rule,
            "control": control,
            "completions": completions,
            "units": units,
            "target": target,
            "spans": _part(SpanRules, spans, flat if units == "spans" else {}),
            "answers": _part(AnswerRules, answers, flat),
            "normalize": normalize,
            "open_spans": open_spans,
            "token_budget": token_budget,
        }
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        check_fields(self)
        if isinstance(rule, Identity) and chosen.negative and control not in ("random", "off"):
            raise ValueError(
                f"weights='identity' takes importances for weights, and estimator={chosen.name!r} gives negative ones; "
                "take 'range', 'bilevel', 'top' or a function"
            )
        if open_spans and units != "spans":
            raise UnreadOptions(["open_spans"], f"open_spans is not read: with units={units!r} there are no spans")
        if getattr(chosen, "mask_observation", False) and units != "turns":
            raise UnreadOptions(["mask_observation"], f"mask_observation is not read: units={units!r} are no turns")
        if target == "gold" and ANSWER not in chosen.needs:
            raise UnreadOptions(["target"], f"target is not read: estimator={chosen.name!r} reads no answer")
        if flat:
            raise UnreadOptions([*flat], _unread(next(iter(flat)), parts))

    @classmethod
    def from_flat(cls, settings: Mapping[str, Any]) -> "CounterfactualConfig":
        """Build a configuration from flat names and values, as YAML, flags and Hydra give them; None is not set."""
        names = {name for name, _, _ in flat_options()} | {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in settings.items() if value is not None or name not in names})

    @classmethod
    def preset(cls, name: str) -> "CounterfactualConfig":
        """Build a configuration that ships, by name: those of the papers, and `presets.DEFAULT_PRESET`.

        Raises `ValueError` for an unknown name, and for one that only the training program can run.
        """
        names = preset_names()
        if name not in names:
            near = _near(name, dict.fromkeys(names))
            raise ValueError(f"credit must be a CounterfactualConfig or one of {', '.join(names)}, got {name!r}{near}")
        settings = yaml.safe_load((PRESETS / f"{name}.yaml").read_text("utf-8"))
        if "estimator" not in settings:
            raise ValueError(f"credit={name!r} runs only in the training program: cfa-train --config {name}")
        return cls.from_flat({"estimator": settings["estimator"], **settings.get("credit_options", {})})

    @property
    def asked_for(self) -> str:
        """Write out the estimator and its options that are not the default, for messages."""
        options = {
            entry.name: value
            for entry in fields(self.estimator)  # type: ignore[arg-type]
            if (value := getattr(self.estimator, entry.name)) != entry.default and entry.name != "function"
        }
        return ", ".join(f"{name}={value!r}" for name, value in {"estimator": self.estimator.name, **options}.items())

    @property
    def runs_estimator(self) -> bool:
        """Whether the estimator runs; not where all weights are 1, or drawn and it is not the caller's function."""
        if self.control == "random":  # a function may give signed values, which are then permuted
            return self.weights is None or isinstance(self.estimator, OwnFunction)
        return self.control != "off"

    @property
    def reads_units(self) -> bool:
        """Whether units are looked for: not where all weights are 1 or every token draws its own."""
        units_draw = self.control == "random" and self.weights is not None and self.weights.token_draws is None
        return self.runs_estimator or units_draw

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
    def rewards_units(self) -> bool:
        """Whether high importances mean good units, so that they count the other way where the advantage is below 0."""
        return self.target == "gold" or self.estimator.is_reward

    @property
    def reads_entropies(self) -> bool:
        """Whether the entropies of sampled tokens must be given."""
        return ENTROPIES in self.needs


def as_config(value: Any) -> CounterfactualConfig:
    """Return `value`, the preset of a name, or the default configuration for None; `TypeError` for anything else."""
    if value is None:
        return CounterfactualConfig()
    if isinstance(value, str):
        return CounterfactualConfig.preset(value)
    if not isinstance(value, CounterfactualConfig):
        remedy = "; make one by CounterfactualConfig.from_flat" if isinstance(value, Mapping) else ""
        raise TypeError(f"the configuration of credit must be a CounterfactualConfig or a name, got {value!r}{remedy}")
    return value


def flat_options() -> Iterator[tuple[str, type, Any]]:
    """Yield the flat name of every option, the part that declares it, and the field; once for each part with it."""
    for part in (*ESTIMATORS.values(), *WEIGHTS.values(), SpanRules, AnswerRules):
        for entry in fields(part):  # type: ignore[arg-type]
            yield entry.name, part, entry


def _part(kind: type, part: Any, flat: dict[str, Any]) -> Any:
    """Return `part`, or make it from its flat options, which are taken out of `flat`."""
    own = {entry.name: flat.pop(entry.name) for entry in fields(kind) if entry.name in flat}
    if part is None:
        return kind(**own)
    if own:
        raise ValueError(f"{next(iter(own))}: {kind.__name__} is given as an object; set the option there")
    return part


def _named(option: str, value: Any, among: Mapping[str, type], own: type, flat: dict[str, Any]) -> Any:
    """Resolve a part given by name, `module:name`, class or object; a function becomes an `own` part."""
    (kind,) = own.__bases__  # of a part, registered or not
    if isinstance(value, str) and ":" in value:
        value = imported(option, value)
    if isinstance(value, str) and value in among:
        return _part(among[value], None, flat)
    if isinstance(value, type) and issubclass(value, kind):
        return _part(value, None, flat)
    if isinstance(value, kind):
        return _part(type(value), value, flat)
    if callable(value):
        return own(value)
    near = _near(value, among) if isinstance(value, str) else ""
    raise ValueError(f"{option} must be a function, 'module:name' or one of {', '.join(among)}, got {value!r}{near}")


def _weight_rule(weights: Any, estimator: Estimator, flat: dict[str, Any]) -> WeightRule | None:
    if estimator.weights is not None:
        return _named("weights", estimator.weights if weights is None else weights, WEIGHTS, OwnWeights, flat)
    if weights is not None:
        signed = f"estimator={estimator.name!r} is signed, its values are added to the advantages"
        raise UnreadOptions(["weights"], f"weights={weights!r} is not read: {signed}")
    return None


def _near(name: str, among: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, among, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _unread(name: str, parts: Mapping[str, Any]) -> str:
    """Explain why an option that none of the chosen parts reads is refused."""
    owners = [part for option, part, _ in flat_options() if option == name]
    if not owners:
        names = {option: None for option, _, _ in flat_options()} | dict.fromkeys(parts)
        return f"unknown option {name!r}{_near(name, names)}"
    if SpanRules in owners:
        return f"{name} is not read: with units={parts['units']!r} no spans are looked for"
    readers = " or ".join(
        f"{'weights' if part in WEIGHTS.values() else 'estimator'}={getattr(part, 'name', '')!r}"
        for part in owners  # type: ignore[attr-defined]
    )
    rule = parts["weights"]
    chosen = f"estimator={parts['estimator'].name!r}" + (f" with weights={rule.name!r}" if rule is not None else "")
    return f"{name} is not read: it is an option of {readers}, and the configuration has {chosen}"
