"""A configuration is made of parts, or of their flat options by name; what no part reads is refused by name."""

import re

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import AnswerRules, SpanRules, UnreadOptions, as_config, flat_options
from cfa_kernels.credit.weights import WEIGHTS, Bilevel, Identity, Range, TopShare
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.estimators.entropy import Entropy
from cfa_kernels.estimators.external import External
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.estimators.siblings import SiblingEdits
from tests.support.plug_ins import TOTAL_EFFECTS


def ones(importances, units, answer, length):
    return torch.ones(length)


def nothing(model, batch):
    return [[0.0] * len(row) for row in batch.units]


SAME = [
    (((), {}), {}),
    (((Masking(outcome="mean", preselect=0.5, preselect_by="gradient"),), {}),
     {"estimator": "masking", "outcome": "mean", "preselect": 0.5, "preselect_by": "gradient"}),
    (((Gradient(sigma=0.01, samples=3),), {}), {"estimator": "gradient", "sigma": 0.01, "samples": 3}),
    (((Gradient(), TopShare(0.1)), {}), {"estimator": "gradient", "weights": "top", "fraction": 0.1}),
    (((Masking(), Bilevel(tau=0.2, floor=0.1), "inverted"), {}),
     {"weights": "bilevel", "tau": 0.2, "floor": 0.1, "control": "inverted"}),
    (((SiblingEdits(correct_threshold=1.0),), {"units": "spans", "spans": SpanRules("sentence", 4, "last")}),
     {"estimator": "sibling_edits", "correct_threshold": 1.0, "units": "spans", "detector": "sentence", "max_spans": 4,
      "selection": "last"}),
    (((External(), Identity()), {"answers": AnswerRules(r"=(\d)", "last_number"), "normalize": "mean"}),
     {"estimator": "external", "weights": "identity", "answer_format": r"=(\d)", "answer_fallback": "last_number",
      "normalize": "mean"}),
    (((Entropy(),), {"control": "random", "token_budget": 100}),
     {"estimator": "entropy", "control": "random", "token_budget": 100}),
    (((nothing, ones), {}), {"estimator": nothing, "weights": ones}),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "flat"), SAME)
def test_parts_and_flat_names_make_the_same_configuration(parts, flat):
    positional, named = parts
    config = CounterfactualConfig(*positional, **named)
    assert config == CounterfactualConfig(**flat) == CounterfactualConfig.from_flat({"sigma": None} | flat)


def reads(estimator: str) -> set[str]:
    """The options that are read with this estimator and all else by default, by the declarations of its parts."""
    kind = ESTIMATORS[estimator]
    parts = {kind, AnswerRules, *([SpanRules] if kind.default_units == "spans" else [])}
    parts |= {WEIGHTS[kind.weights]} if kind.weights is not None else set()
    return {name for name, part, _ in flat_options() if part in parts}


OPTIONS = {name: entry.default for name, _, entry in flat_options()}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_option_that_nothing_reads_is_refused_by_name_even_at_its_default(estimator, option):
    given = {"estimator": estimator, option: OPTIONS[option]}
    if option in reads(estimator):
        CounterfactualConfig(**given)
    else:
        with pytest.raises(ValueError, match=f"^{option} is not read: "):
            CounterfactualConfig(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": Gradient(), "sigma": 0.1}, "sigma: Gradient is given as an object; set the option there"),
        ({"weights": Range(), "w_max": 2.0}, "w_max: Range is given as an object; set the option there"),
        ({"spans": SpanRules(), "max_spans": 2}, "max_spans: SpanRules is given as an object; set the option there"),
        ({"sigma": 1.0}, "it is an option of estimator='gradient', and the configuration has estimator='masking' with"),
        ({"tau": 0.1}, "tau is not read: it is an option of weights='bilevel', and .* with weights='range'"),
        ({"units": "tokens", "max_spans": 3}, "max_spans is not read: with units='tokens' no spans are looked for"),
        (
            {"estimator": "prefix_tree", "weights": "range"},
            "weights='range' is not read: estimator='prefix_tree' is signed",
        ),
        ({"units": "tokens", "open_spans": True}, "open_spans is not read: with units='tokens' there are no spans"),
        ({"units": "turns", "max_spans": 3}, "max_spans is not read: with units='turns' no spans are looked for"),
        ({"units": "turns", "open_spans": True}, "open_spans is not read: with units='turns'"),
        ({"mask_observation": True}, "mask_observation is not read: units='spans' are no turns"),
        ({"estimator": "entropy", "target": "gold"}, "target is not read: estimator='entropy' reads no answer"),
        ({"samples": 2}, "samples is not read: it is an option of estimator='gradient', and"),
        ({"preselect_by": "gradient"}, "preselect_by='gradient' is not read: preselect is 1"),
        ({**TOTAL_EFFECTS, "outcome": "mean"}, "outcome is not read: .* has estimator='total_effects'"),
        ({"sigmma": 1.0}, "unknown option 'sigmma'; did you mean 'sigma'"),
        ({"token_budgets": 1}, "unknown option 'token_budgets'; did you mean 'token_budget'"),
        ({"nothing_like_it": 1}, "unknown option 'nothing_like_it'$"),
        ({"estimator": "gradiant"}, "got 'gradiant'; did you mean 'gradient'"),
        ({"weights": "bilevl"}, "got 'bilevl'; did you mean 'bilevel'"),
        ({"control": "x"}, "control must be one of 'inverted', 'permuted', 'random', 'off' or None, got 'x'"),
        ({"completions": "right"}, "completions must be one of .*got 'right'"),
        ({"max_spans": 0}, "max_spans must be an integer, at least 1, got 0"),
        ({"w_max": 0.1}, "w_min must not exceed w_max, got 0.5 and 0.1"),
        ({"detector": "code"}, "detector must be one of 'math', .*, 'python' or a function, got 'code'"),
        ({"estimator": "mask"}, "estimator must be a function, 'module:name' or one of masking, .* got 'mask'"),
        ({"weights": "softmax"}, "weights must be a function, 'module:name' or one of range, .* got 'softmax'"),
        ({"weights": "bilevel", "tau": 1.5}, r"tau must be in \[0, 1\], got 1.5"),
        ({"w_max": 10**400}, "w_max must be finite and at least 0, got 1000"),
        ({"preselect": "x"}, r"preselect must be in \(0, 1\], got 'x'"),
        ({"preselect": 0.0}, r"preselect must be in \(0, 1\], got 0.0"),
        ({"preselect": 0.5, "preselect_by": "middle"}, "preselect_by must be one of length, masking, .* got 'middle'"),
        ({"estimator": "entropy_shaping", "kappa": 0.5}, "kappa must be finite and at least 1, got 0.5"),
        ({"estimator": "entropy_shaping", "alpha": -0.1}, "alpha must be finite and at least 0, got -0.1"),
        ({"estimator": "entropy_shaping", "weights": "top"}, "estimator='entropy_shaping' is signed"),
        ({"placeholder_id": -1}, "placeholder_id must be an integer, at least 0 or None, got -1"),
        ({"token_budget": 0}, "token_budget must be an integer, at least 1 or None, got 0"),
        ({"weights": "identity"}, "weights='identity' .* estimator='masking' gives negative ones"),
    ],
)
def test_what_is_given_twice_or_not_read_or_misspelt_or_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        CounterfactualConfig(**options)
    is_name = re.match(r"unknown option|\w+ is not read", str(raised.value))
    assert isinstance(raised.value, UnreadOptions) or not is_name


@pytest.mark.parametrize(
    ("estimator", "runs"),
    [("masking", False), ("entropy", False), ("entropy_shaping", True), (lambda model, batch: batch.units, True)],
)
def test_where_weights_are_drawn_only_signed_estimators_and_functions_run(estimator, runs):
    assert CounterfactualConfig(estimator, control="random").runs_estimator == runs


def test_what_is_no_configuration_is_refused_with_what_makes_one():
    assert as_config(None) == CounterfactualConfig()
    assert as_config("oar_p") == CounterfactualConfig.preset("oar_p")
    with pytest.raises(TypeError, match=r"CounterfactualConfig or a name, got {'w_max': 3.0}; make one by .*from_flat"):
        as_config({"w_max": 3.0})
    with pytest.raises(TypeError, match=r"must be a CounterfactualConfig or a name, got 3$"):
        as_config(3)
    with pytest.raises(ValueError, match=r"must be a CounterfactualConfig or one of cf, .*, got 'oar'; did you"):
        as_config("oar")
