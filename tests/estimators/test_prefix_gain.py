"""Answers asked behind each step equal plain forwards, and cost no more than they feed; probes end completions."""

import copy

import pytest
import torch

from cfa_kernels.estimators.prefix_gain import PrefixGain
from cfa_kernels.estimators.probes import length_without_eos
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.span import Span
from tests.support.models import batch_of, make_model, naive_row, tokens

EOS = 2


def problem():
    """Rows of two prompts in turn: a gap between units, no marker, reasoning up to the marker, no units."""
    first, second = tokens(7, 20)
    completions = tokens(20, 33, 17, 12, seed=1)
    completions[2][:9] = completions[0][:9]
    units = [[Span(2, 5), Span(7, 12)], [Span(0, 20), Span(20, 28)], [Span(9, 15)], []]
    answers = [Span(16, 18), Span(30, 33), Span(16, 17), None]
    return [first, second, first.clone(), second], completions, units, answers, [14, 30, 15, 12]


def gains_of(model, prompts, completions, units, answers, ends, *, token_budget=None):
    """Gains in the order of `completions`, and what they took."""
    rows = batch_of(model, prompts, completions, units, answers, token_budget=token_budget, reasoning_ends=ends)
    result = PrefixGain()(InProcess(model), rows)
    return result.values, result.work


def probabilities(model, prompt, completion, units, answer, end):
    """Of the answer before the first unit and after each, by plain float64 forwards."""
    exact, means = copy.deepcopy(model).double(), []
    for t in [units[0].start, *(unit.end for unit in units)] if units else []:
        row = naive_row(exact, torch.cat([prompt, completion[:t]]), completion[end : answer.end])
        means.append(row[answer.start - end :].mean().item())
    return torch.tensor(means).exp()


@pytest.mark.parametrize("name", ["Qwen3", "Mistral"])
@pytest.mark.parametrize("budget", [None, 1])
def test_gains_are_differences_of_plain_forwards_from_one_unit_to_the_next(name, budget):
    model = make_model(name)
    data = problem()
    gains, work = gains_of(model, *data, token_budget=budget)
    expected = [probabilities(model, *row).diff() for row in zip(*data, strict=True)]
    torch.testing.assert_close(gains, expected, rtol=1e-4, atol=1e-7)
    assert [len(gain) for gain in gains] == [2, 2, 1, 0]
    assert budget or work.forwards == 1


def test_a_completion_and_its_probes_are_fed_once(qwen3):
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    _, work = gains_of(qwen3, [prompt], [completion], [[Span(4, 10), Span(10, 16)]], [Span(17, 19)], [16])
    # Prompt, the completion up to the last unit, and behind each of three places all but the answer's last token.
    assert work.tokens_fed == 9 + 16 + 3 * 2
    assert work.forwards == 1


@pytest.mark.parametrize(("ids", "kept"), [([5, 2, 6, 2, 2], 3), ([2, 2], 0), ([5, 6], 2), ([5, 3, 2], 1)])
def test_only_the_end_of_text_tokens_at_the_end_are_left_out(ids, kept):
    assert length_without_eos(torch.tensor(ids), {2, 3}) == kept


def test_rows_with_another_rotary_frequency_are_asked_apart():
    """Beyond 24 tokens this model takes its other set of frequencies: each value is as if it were fed alone."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [6.0] * 8}
    model = make_model("Phi3", original_max_position_embeddings=24, rope_parameters=rope)
    (prompt,), (completion,) = tokens(9), tokens(33, seed=5)
    row = completion, [Span(5, 11), Span(11, 12), Span(12, 13), Span(13, 20)], Span(31, 33), 30
    (gains,), _ = gains_of(model, [prompt], *([column] for column in row))
    torch.testing.assert_close(gains, probabilities(model, prompt, *row).diff(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": [[], [Span(2, 5), Span(4, 6)], [], []]}, r"units row 1, unit 1: \(4, 6\) is empty or starts before"),
        ({"answers": [None] * 4}, "row 0: its reasoning must end before its answer, got 14, None"),
        ({"ends": None}, "reasoning_ends is None"),
        ({"ends": [14, 31, 15, 12]}, "row 1: its reasoning must end before its answer, got 31"),
    ],
)
def test_bad_rows_are_refused_by_row_and_value(qwen3, change, message):
    named = dict(zip(("prompts", "completions", "units", "answers", "ends"), problem(), strict=True))
    with pytest.raises(ValueError, match=message):
        gains_of(qwen3, **named | change)
