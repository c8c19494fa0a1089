"""A configuration is made of parts, or of options by path; what no part reads is refused by its path."""

from dataclasses import replace

import pytest
import torch

from cfa_kernels import CounterfactualConfig
from cfa_kernels.credit.config import PARTS, AnswerRules, SpanRules, as_config, part_options
from cfa_kernels.credit.presets import preset_names
from cfa_kernels.credit.weights import WEIGHTS, Bilevel, Identity, Range, TopShare
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.estimators.entropy import Entropy
from cfa_kernels.estimators.external import External
from cfa_kernels.estimators.gradient import Gradient
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.estimators.prefix_gain import PrefixGain
from cfa_kernels.estimators.siblings import SiblingEdits
from tests.support.plug_ins import TOTAL_EFFECTS


def ones(importances, units, answer, length):
    return torch.ones(length)


def nothing(model, batch):
    return [[0.0] * len(row) for row in batch.units]


OF = CounterfactualConfig
SAME = [
    (OF(), {}),
    (OF(Masking(outcome="mean", preselect=0.5, preselect_by="gradient")),
     {"estimator": "masking", "estimator.outcome": "mean", "estimator.preselect": 0.5,
      "estimator.preselect_by": "gradient"}),
    (OF(Gradient(sigma=0.01, samples=3)), {"estimator.samples": 3, "estimator": "gradient", "estimator.sigma": 0.01}),
    (OF(Gradient(), TopShare(0.1)), {"estimator": "gradient", "weights": "top", "weights.fraction": 0.1}),
    (OF(Gradient(), Bilevel(tau=0.1)), {"estimator": "gradient", "weights.tau": 0.1}),
    (OF(SiblingEdits(correct_threshold=1.0), units="spans", spans=SpanRules("sentence", 4, "last")),
     {"estimator": "sibling_edits", "estimator.correct_threshold": 1.0, "units": "spans", "spans.detector": "sentence",
      "spans": {"max_spans": 4, "selection": "last"}}),
    (OF(External(), Identity(), answers=AnswerRules(r"=(\d)", "last_number"), normalize="mean"),
     {"estimator": "external", "weights": "identity", "answers.answer_format": r"=(\d)",
      "answers.answer_fallback": "last_number", "normalize": "mean"}),
    (OF(Entropy(), control="random", token_budget=100),
     {"estimator": "entropy", "control": "random", "token_budget": 100}),
    (OF(nothing, ones), {"estimator": nothing, "weights": ones}),
    (OF(PrefixGain(), Range(0.5, 4.0, 1.5, 0.0), answers=AnswerRules(lead_in="statement"),
        spans=SpanRules("math", 3, "first")),
     {"preset": "cf", "estimator": "prefix_gain", "spans.max_spans": 3}),
    (OF(Masking(mask="drop"), Range(0.5, 2.0, 1.5, 0.0), answers=AnswerRules(lead_in="statement"),
        spans=SpanRules("math", 10, "first")),
     {"preset": "cf", "estimator.mask": "drop", "weights.w_max": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "options"), SAME)
def test_parts_and_options_by_path_make_the_same_configuration(config, options):
    assert config == CounterfactualConfig.of(options)


def reads(estimator: str) -> set[str]:
    """The paths that are read with this estimator and all else by default, by the declarations of its parts."""
    kind = ESTIMATORS[estimator]
    parts = {kind, AnswerRules, *([SpanRules] if kind.default_units == "spans" else [])}
    parts |= {WEIGHTS[kind.weights]} if kind.weights is not None else set()
    return {path for path, part, _ in part_options() if part in parts}


OPTIONS = {path: entry.default for path, _, entry in part_options()}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_option_that_nothing_reads_is_refused_by_its_path_even_at_its_default(estimator):
    for path, default in OPTIONS.items():
        given = {"estimator": estimator, path: "" if default is None else default}
        if path in reads(estimator):
            CounterfactualConfig.of({**given, path: default})
        else:
            with pytest.raises(ValueError, match=f"^({path}|{path.partition('.')[0]}.*) is not read: "):
                CounterfactualConfig.of(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": Gradient(), "estimator.sigma": 0.1}, "estimator.sigma: estimator is given as an object"),
        ({"spans": SpanRules(), "spans.max_spans": 2}, "spans.max_spans: spans is given as an object; set the option"),
        ({"estimator.sigma": 1.0}, "estimator='masking' has outcome, .*; it is an option of gradient$"),
        ({"weights.tau": 0.1}, "weights.tau is not read: weights='range' has w_min, .*; it is an option of bilevel$"),
        ({"estimator": {"name": nothing, "x": 1}}, "estimator.x: .* has no options; omit it"),
        ({"units": "tokens", "spans.max_spans": 3}, "spans is not read: with units='tokens' no spans are looked for"),
        ({"estimator": "prefix_tree", "weights": "range"}, "weights='range' is not read: .*prefix_tree' is signed"),
        ({"units": "turns", "open_spans": True}, "open_spans is not read: with units='turns' there are no spans"),
        ({"estimator.mask_observation": True}, "mask_observation is not read: units='spans' are no turns"),
        ({"estimator": "entropy", "target": "gold"}, "target is not read: estimator='entropy' reads no answer"),
        ({"estimator.preselect_by": "gradient"}, "preselect_by='gradient' is not read: preselect is 1"),
        ({**TOTAL_EFFECTS, "estimator.outcome": "mean"}, "estimator.outcome is not read: .*'total_effects' has"),
        ({"sigma": 1.0}, "unknown option 'sigma' of credit; did you mean 'estimator.sigma'"),
        ({"estimator": "gradient", "estimator.sigmma": 1.0}, "estimator='gradient' has .*; did you mean 'sigma'"),
        ({"token_budgets": 1}, "unknown option 'token_budgets' of credit; did you mean 'token_budget'"),
        ({"nothing_like_it": 1}, "unknown option 'nothing_like_it' of credit$"),
        ({"estimator": "gradiant"}, "got 'gradiant'; did you mean 'gradient'"),
        ({"control": "x"}, "control must be one of 'inverted', 'permuted', 'random', 'off' or None, got 'x'"),
        ({"spans.max_spans": 0}, "max_spans must be an integer, at least 1, got 0"),
        ({"weights.w_max": 0.1}, "w_min must not exceed w_max, got 0.5 and 0.1"),
        ({"spans.detector": "code"}, "detector must be one of 'math', .*, 'python' or a function, got 'code'"),
        ({"estimator": "mask"}, "estimator must be a function, 'module:name' or one of masking, .* got 'mask'"),
        ({"weights": "bilevel", "weights.tau": 1.5}, r"tau must be in \[0, 1\], got 1.5"),
        ({"estimator.preselect": 0.5, "estimator.preselect_by": "middle"}, "preselect_by must be one of length, mask"),
        ({"estimator": "entropy_shaping", "estimator.kappa": 0.5}, "kappa must be finite and at least 1, got 0.5"),
        ({"estimator.placeholder_id": -1}, "placeholder_id must be an integer, at least 0 or None, got -1"),
        ({"weights": "identity"}, "weights='identity' takes no negative .* estimator='masking' gives"),
        ({"preset": "oar"}, "credit must be 'none' or one of cf, .*, got 'oar'; did you mean 'oar_"),
    ],
)  # fmt: skip
def test_what_is_not_read_or_misspelt_or_out_of_range_is_refused_by_its_path(options, message):
    with pytest.raises(ValueError, match=message):
        CounterfactualConfig.of(options)


@pytest.mark.parametrize(
    ("estimator", "runs"),
    [("masking", False), ("entropy", False), ("entropy_shaping", True), (lambda model, batch: batch.units, True)],
)
def test_where_weights_are_drawn_only_signed_estimators_and_functions_run(estimator, runs):
    assert CounterfactualConfig(estimator, control="random").runs_estimator == runs


def test_a_name_a_mapping_and_an_object_are_configurations_and_nothing_else_is():
    assert {as_config(name) == CounterfactualConfig.of({"preset": name}) for name in preset_names()} == {True}
    assert as_config({"estimator": "gradient"}) == CounterfactualConfig("gradient")
    assert as_config(OF(Gradient())) == OF(Gradient())
    assert as_config({"answers.answer_fallback": "last_number"}).control == "off"
    with pytest.raises(ValueError, match=r"^weights is not read: credit is off; name a preset or an estimator$"):
        as_config({"weights.w_max": 3.0, "estimator": None})
    with pytest.raises(
        TypeError, match=r"credit must be a CounterfactualConfig, a preset's name, or a mapping, got 3$"
    ):
        as_config(3)


def test_a_part_put_in_beside_the_others_is_found_by_its_name_and_no_list_has_to_know_it(monkeypatch):
    kind = type("Prepared", (Gradient,), {"name": "prepared"})
    monkeypatch.setitem(PARTS["estimator"], "prepared", kind)
    assert CounterfactualConfig.of({"estimator": "prepared", "estimator.samples": 2}).estimator == kind(samples=2)


def test_a_configuration_is_rebuilt_with_other_fields():
    config = CounterfactualConfig.preset("oar_g")
    assert replace(config, control="inverted") == CounterfactualConfig.of({"preset": "oar_g", "control": "inverted"})
    with pytest.raises(ValueError, match="spans is not read: with units='tokens'"):
        replace(CounterfactualConfig.preset("cf"), units="tokens")  # which has rules of its own
