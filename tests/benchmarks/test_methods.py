"""Scores of spans against plain forwards, agreement with a truth by hand, pieces of work that are kept."""

import itertools
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.harness.results import Pieces
from benchmarks.research.agreement import AUROC, SPEARMAN, agreement
from benchmarks.research.continuations import METHODS
from benchmarks.research.methods import judge
from benchmarks.research.models import Subject, posed
from cfa_kernels import Rows
from cfa_kernels.text.find import find_reasoning
from examples.problems import generate
from trainer.analyze.tables import bootstrap_interval
from trainer.data import Row
from trainer.settings import ASSETS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject():
    return Subject(str(ASSETS))


@pytest.fixture(scope="module")
def cases(subject):
    """Prompts, completions and what is found in them: two right solutions."""
    some = list(itertools.islice(generate("test", 0), 2))
    asked = posed([Row({"question": one.question, "answer": one.solution()}) for one in some], subject.tokenizer)
    completions = [torch.tensor(subject.tokenizer(one.solution())["input_ids"]) for one in some]
    rows = Rows([torch.tensor(problem.prompt) for problem in asked], completions)
    return SimpleNamespace(rows=rows, found=[*find_reasoning(dict(enumerate(completions)), subject.tokenizer).values()])


def scores(subject, cases, name, **options):
    return judge(METHODS[name], subject, cases.rows, cases.found, **options)[0]


def plain_logprobs(subject, prompt, completion):
    """(T, V) of the tokens of a completion, by one plain forward."""
    with torch.no_grad():
        rows = subject.model(input_ids=torch.cat([prompt, completion])[None]).logits[0].double().log_softmax(-1)
    return rows[len(prompt) - 1 : -1]


def answer_logprob(subject, prompt, completion, answer, masked=()):
    """With a placeholder in the place of some tokens."""
    completion = completion.clone()
    completion[list(masked)] = subject.tokenizer.pad_token_id
    rows = plain_logprobs(subject, prompt, completion)
    return sum(rows[t, completion[t]].item() for t in range(*answer))


@pytest.mark.parametrize("single", [False, True])
def test_masked_spans_and_tokens_are_differences_of_plain_forwards(subject, cases, single):
    values = scores(subject, cases, "CF", single=single)
    assert [len(row) for row in values] == [len(one.spans) for one in cases.found]
    prompt, completion, one = cases.rows.prompts[0], cases.rows.completions[0], cases.found[0]
    base = answer_logprob(subject, prompt, completion, one.answer)
    for unit, value in list(zip(one.spans, values[0].tolist(), strict=True))[-1 if single else 0 :]:
        masks = [[t] for t in range(*unit)] if single else [range(*unit)]
        drops = [base - answer_logprob(subject, prompt, completion, one.answer, mask) for mask in masks]
        assert value == pytest.approx(statistics.fmean(drops), abs=1e-4)


def test_entropy_is_that_of_the_distribution_each_token_was_drawn_from(subject, cases):
    prompt, completion, one = cases.rows.prompts[0], cases.rows.completions[0], cases.found[0]
    logp = plain_logprobs(subject, prompt, completion)
    entropy = -(logp.exp() * logp).sum(-1)
    expected = [entropy[unit.start : unit.end].mean().item() for unit in one.spans]
    assert scores(subject, cases, "entropy")[0].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_number_for_each_span_and_repeats_itself(subject, cases, name):
    once, again = (scores(subject, cases, name, single=name == "OAR-P") for _ in range(2))
    assert [len(row) for row in once] == [len(one.spans) for one in cases.found]
    assert all(map(torch.equal, once, again))


def test_a_rule_by_position_alone_has_a_position_free_auroc_of_one_half():
    rng = random.Random(0)
    truths = [[rng.random() < (k + 1) / 8 for k in range(7)] for _ in range(20)]  # what matters comes late
    rows = [[float(k) for k in range(7)] for _ in truths]
    for sign in (1, -1):
        result = agreement([[sign * x for x in row] for row in rows], truths, AUROC | SPEARMAN, draws=50)
        assert result["auroc"] == {"value": 0.5, "low": 0.5, "high": 0.5}
        assert sign * result["spearman"]["value"] > 0.2
    perfect = agreement(truths, truths, AUROC | SPEARMAN, draws=50)
    assert [perfect[name]["value"] for name in ("auroc", "spearman")] == pytest.approx([1.0] * 2)


def test_equal_scores_win_half_a_pair():
    scores, truth = np.array([2.0, 2.0, 1.0, 3.0]), np.array([False, True, True, False])
    assert AUROC["auroc"][0](scores, truth) == (0.5, 2, 0.0, 2)
    assert agreement([scores], [truth], AUROC)["auroc"] is None  # one problem has no interval


def test_a_method_without_ranks_has_correlation_zero_and_constant_truths_are_left_out():
    truths = [[0.0, 1.0], [0.3, 0.3], [0.0, 1.0]]
    result = agreement([[1.0, 1.0], [1.0, 2.0], [0.0, 5.0]], truths, SPEARMAN, draws=20)
    assert result["spearman"]["value"] == pytest.approx(0.5)
    assert result["problems"] == 2
    assert agreement([[1.0, 2.0]], [[0.5, 0.5]], SPEARMAN) == {"problems": 0}


def test_random_scores_have_expectation_one_half_and_honest_intervals():
    """Of 100 draws 95 % of the bootstrap intervals hold 0.5; one draw only may well miss it."""
    rng = np.random.default_rng(1)
    truths = [np.array([rng.random() < 0.5 for _ in range(5)]) for _ in range(120)]
    truths = [row for row in truths if len(set(row)) > 1]
    result = []
    for _ in range(100):
        pairs = [AUROC["auroc"][0](rng.random(len(row)), row) for row in truths]
        result.append(bootstrap_interval(AUROC["auroc"][1], pairs, draws=120))
    spread = statistics.stdev(one.value for one in result)
    assert abs(statistics.fmean(one.value for one in result) - 0.5) < 3 * spread / len(result) ** 0.5
    assert 0.9 <= statistics.fmean(one.low <= 0.5 <= one.high for one in result) <= 0.99
    # What is reported in their place: the mean of many draws, and where 95 % of them fall.
    reported = agreement(None, truths, AUROC)["auroc"]
    assert abs(reported["value"] - 0.5) < 0.01
    assert reported["high"] - reported["low"] == pytest.approx(4 * spread, rel=0.25)


def test_pieces_are_done_once_and_refused_under_another_commit_or_other_settings(tmp_path):
    head, calls = {"environment": {"commit": "abc"}}, []
    for _ in range(2):
        pieces = Pieces(tmp_path, {"draws": 3}, head)
        assert pieces.get("a, 1", lambda: calls.append(1) or {"x": (1, 2)}) == {"x": [1, 2]}
    assert len(calls) == 1
    for settings, commit in (({"draws": 4}, "abc"), ({"draws": 3}, "def")):
        with pytest.raises(ValueError, match="name another --folder"):
            Pieces(tmp_path, settings, {"environment": {"commit": commit}})
