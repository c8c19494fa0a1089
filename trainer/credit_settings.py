"""Declare the settings of credit for flags and YAML: every option of the library's parts under its own name.

They are a part of `TrainConfig`; `counterfactual` turns them into the library's configuration.
"""

from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import flat_options
from cfa_kernels.credit.weights import WEIGHTS, Control
from cfa_kernels.estimators.registry import ESTIMATORS
from cfa_kernels.options import option_docs
from cfa_kernels.text.rules import DetectorName
from trainer.rewards import load_answer_format

CONTROLS: dict[str, Control | None] = {
    "counterfactual": None,
    "inverted": "inverted",
    "random": "random",
    "uniform": "off",
}
"""The library's `control` by the value of the setting `credit`."""

# Importances that a caller hands in have no flag.
_ESTIMATORS = tuple(name for name in ESTIMATORS if name != "external")
_OWN = {
    "credit": (
        Literal[tuple(CONTROLS)],  # type: ignore[valid-type]
        "How credit is spread over tokens: by importance, its inverse, at random, or evenly (DAPO).",
        "counterfactual",
    ),
    "estimator": (Literal[_ESTIMATORS], "What finds the importance of a unit.", "masking"),  # type: ignore[valid-type]
    "weights": (
        Literal[tuple(WEIGHTS)] | None,  # type: ignore[valid-type]
        "How importances become weights; by default what the estimator's source does.",
        None,
    ),
    "units": (
        Literal["spans", "tokens"] | None,
        "What is judged as one; by default what the estimator's source does.",
        None,
    ),
    "normalize": (
        Literal["mean"] | None,
        "mean rescales each completion's weights to mean 1; by default they are not rescaled, as in the paper.",
        None,
    ),
    "correct_threshold": (float, "Completions with at least this reward count as correct.", 0.5),
    "token_budget": (
        int | None,
        "Most packed tokens of a forward, in the update and of masked branches; a group that is larger gets a forward "
        "of its own. By default what half of the free memory holds.",
        None,
    ),
}
_OF_FLAGS = {
    "detector": DetectorName,
    "answer_format": str,
}
"""Types of options that take more in Python than a flag can say."""


def _fields() -> list[tuple[str, Any, Any]]:
    """A field for every option, None where it is not set, so that the library's default and its checks hold."""
    listed = {name: (kind, text, default) for name, (kind, text, default) in _OWN.items()}
    for name, part, entry in flat_options():
        kind: Any = _OF_FLAGS.get(name) or get_type_hints(part)[name]
        text, label = option_docs(part)[name], getattr(part, "name", None)
        default = "" if entry.default is None else f" Default {entry.default}."
        said = f"{text}{default}" + (f" Read by {label}." if label else "")
        if name in _OWN:
            continue
        if name in listed:
            said = f"{listed[name][1]} {said}" if listed[name][1] != said else said
        listed[name] = (kind | None, said, None)
    return [
        (name, Annotated[kind, tyro.conf.arg(help=text)], field(default=default, metadata={"help": text}))
        for name, (kind, text, default) in listed.items()
    ]


class _Credit:
    """Settings of credit; those that are not set have the library's defaults."""

    def counterfactual(self) -> CounterfactualConfig:
        """Build the library's configuration."""
        given = {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}
        if "correct_threshold" not in {entry.name for entry in fields(ESTIMATORS[given["estimator"]])}:  # type: ignore[arg-type]
            del given["correct_threshold"]  # the program itself reads it, too
        return CounterfactualConfig.from_flat(
            given | {"control": CONTROLS[given.pop("credit")]} | self.answer_options()
        )

    def answer_options(self) -> dict[str, Any]:
        """Return the run's own form of answers, as `answer_text_span` takes it."""
        return {
            "answer_format": load_answer_format(self.answer_format),  # type: ignore[attr-defined]
            "answer_fallback": self.answer_fallback,  # type: ignore[attr-defined]
        }


CreditSettings: Any = make_dataclass("CreditSettings", _fields(), bases=(_Credit,))
NAMES = tuple(CreditSettings.__dataclass_fields__)
