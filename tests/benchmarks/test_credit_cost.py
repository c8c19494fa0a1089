"""What credit costs: counts against arithmetic, scaled forwards, and no figure for a wrong answer."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.evidence import cost_runs
from benchmarks.evidence import definitions as credit_definitions
from benchmarks.evidence.cost_runs import cheaper, gradients, masking, token_units
from benchmarks.evidence.cost_tables import compared, markdown, reached
from benchmarks.harness.race import WrongAnswer
from benchmarks.harness.workloads import Job, random_model
from cfa_kernels import Span
from cfa_kernels.ops.adapted_linear import adapted_linear
from cfa_kernels.scoring.masked import score_counterfactuals

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPT, LENGTHS, STRIDE = 6, (14, 17), 5


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3-tiny", device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def job() -> Job:
    generator = torch.Generator().manual_seed(0)
    prompt, *completions = (torch.randint(5, 900, (n,), generator=generator) for n in (PROMPT, *LENGTHS))
    spans = [[Span(0, 3), Span(4, 8)], [Span(2, 6)]]
    answers = [Span(n - 2, n) for n in LENGTHS]
    return Job("two rows", "random ids", [prompt] * 2, completions, spans, answers, 0, None)


@pytest.fixture(scope="module")
def tokens(model, job):
    return masking(model, job, token_units(job), ("mean", "last"), STRIDE)


def test_counts_of_masking_every_token_are_those_of_its_lengths(job, tokens):
    """A token's branch runs from it to the last row that matters; a forward from the start of the prompt."""
    fed = [n - 1 for n in LENGTHS]
    branches = sum(n - t for n, units in zip(fed, token_units(job), strict=True) for t in range(len(units)))
    shared = 1  # both start with a placeholder when their first token is masked
    assert tokens["packed"]["mean"]["tokens_fed"] == PROMPT + sum(fed) + branches - shared
    forwards = sum((PROMPT + n) * (1 + len(units)) for n, units in zip(fed, token_units(job), strict=True))
    assert tokens["packed"]["mean"]["tokens_unshared"] == forwards
    for name in ("full", "full_needed"):
        assert tokens[name]["tokens_fed"] == pytest.approx(forwards)
        assert (tokens[name]["run"], tokens[name]["wanted"]) == (2 + 2 + 3, sum(LENGTHS) - 4)
    assert tokens["full_needed"]["flops"] < tokens["full"]["flops"]


def test_a_cost_is_scaled_to_the_forwards_that_were_not_run(model, job):
    some, every = (
        credit_definitions.full_forwards(model, job, 0, token_units(job)[0][::step], wanted=11) for step in (4, 1)
    )
    assert (some.run, every.run) == (4, 12)
    assert some.of_all(some.flops) == pytest.approx(every.flops)
    assert every.of_all(every.tokens_fed) == every.tokens_fed


def test_products_of_adapted_layers_are_counted():
    """They are ops that torch has no count for: a draw seemed to cost less than its linear layers."""
    rows, weight, down, up = torch.ones(6, 8), torch.ones(5, 8), torch.ones(2, 8), torch.ones(5, 2)
    with FlopCounterMode(display=False, custom_mapping=cost_runs.FORMULAS) as counter:
        adapted_linear(rows, weight, None, down, up, 1.0)
    assert counter.get_total_flops() == 2 * (6 * 8 * 5 + 6 * 8 * 2 + 6 * 2 * 5)


@pytest.mark.parametrize("outcome", ["logprob", "mean", "last"])
def test_a_wrong_answer_gets_no_time(outcome, model, job, monkeypatch):
    def shifted(*args, **options):
        units = [[Span(max(s.start - 1, 0), max(s.end - 1, 1)) for s in row] for row in args[3]]
        return score_counterfactuals(*args[:3], units, *args[4:], **options)

    monkeypatch.setattr(cost_runs, "score_counterfactuals", shifted)
    with pytest.raises(WrongAnswer, match=f"{outcome}: off by"):
        masking(model, job, token_units(job), (outcome,), STRIDE)


def test_the_page_says_of_every_target_whether_it_was_reached(model, job, tokens):
    document = {
        "command": "a command",
        "environment": {"commit": "abc", "device": {"name": "a processor", "cores": 2}},
        "load": 1.0,
        "settings": {"model": "qwen3-tiny", "turns": 1, "stride": STRIDE},
        "job": job.describe(),
        "tokens": [tokens],
        "spans": [masking(model, job, job.spans, ("logprob",), 1)],
        "gradients": {"full": gradients(model, job, 1)},
        "cheaper": cheaper(model, job, 1),
    }
    document["rows"] = compared(document)
    rows = {row["name"]: row for row in document["rows"]}
    probes = len([0, 3, 8]) + len([2, 6])  # of a marker and an answer of two tokens, whose last is not fed
    assert rows["prefix_gain"]["branch_rows"] == 2 * probes
    exact = sum(n - 1 - span.start for n, spans in zip(LENGTHS, job.spans, strict=True) for span in spans)
    assert rows["prefix_gain"]["branch_rows beside"] == exact
    text = markdown(document)
    assert text.count("reached") + text.count("missed") == 2 * 2 + 3 + 1
    assert "| OAR-P, `mean` | a full forward per token |" in text


@pytest.mark.parametrize(("factor", "said"), [(0.99, "missed"), (1.01, "reached")])
def test_a_target_is_reached_from_its_number_on(factor, said):
    row = {"targets": {"speed": 5.0}, "seconds": 2.0, "seconds beside": 10.0 * factor, "draws": 1}
    assert reached(row)[0].endswith(said)
    share = {"targets": {"per_draw": 1.5}, "seconds": 6.0, "seconds beside": factor, "draws": 4}
    assert reached(share)[0].endswith(said)


def test_rows_of_a_job_that_are_not_asked_for_do_not_count(job):
    assert token_units(replace(job, answers=[Span(4, 5), Span(3, 4)])) == [
        [Span(0, 1), Span(1, 2), Span(2, 3)], [Span(0, 1), Span(1, 2)],
    ]  # fmt: skip
