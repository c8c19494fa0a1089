"""Probes behind completions and behind each step equal plain forwards, and cost no more than they feed."""

import copy

import pytest
import torch

from cfa_kernels.estimators.prefix_gain import prefix_gain, prefix_values
from cfa_kernels.estimators.probes import Probe, length_without_eos, own_probe, with_probes
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.masked import score_counterfactuals
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, VOCAB, batch_of, make_model, naive, tokens

EOS = 2


@pytest.fixture(scope="module")
def qwen3():
    return make_model("Qwen3")


def problem():
    """Rows of two prompts in turn, one without boundaries, a boundary twice, probes with and without a lead-in."""
    first, second = tokens(7, 20)
    completions = tokens(20, 33, 17, 12, seed=1)
    completions[2][:9] = completions[0][:9]
    probes = [
        own_probe(completions[0], Span(16, 18), 14),
        Probe(torch.tensor([9, 8, 7, 6]), Span(0, 3)),
        Probe(torch.tensor([5]), Span(0, 1)),
        None,
    ]
    boundaries = [[0, 4, 14], [33, 7, 7, 20], [17, 0], []]
    return [first, second, first.clone(), second], completions, boundaries, probes


def values_of(model, prompts, completions, boundaries, probes, *, token_budget=None, **options):
    """Values in the order of `completions`, and what they took."""
    rows = batch_of(model, prompts, completions, token_budget=token_budget)
    asked = (
        [column[b] for b in rows.numbers] if len(column) == len(rows) else column for column in (boundaries, probes)
    )
    values, work = prefix_values(InProcess(model), rows, *asked, **options)
    return rows.to_callers_order(values), work


def gains_of(model, prompts, completions, units, probes):
    rows = batch_of(model, prompts, completions, units)
    found = prefix_gain(InProcess(model), rows, [probes[b] for b in rows.numbers])
    return rows.to_callers_order(found.values), found.work


def judged_mean(model, prompt, completion, boundary, probe):
    """Mean log-prob of the probe's target by one plain float64 forward."""
    exact = copy.deepcopy(model).double().eval()
    ids = torch.cat([prompt, completion[:boundary], probe.tokens])
    with torch.no_grad():
        logprobs = exact(input_ids=ids[None].to(exact.device)).logits[0].double().cpu().log_softmax(-1)
    start = len(prompt) + boundary
    places = [start + i for i in range(*probe.target)]
    return sum(logprobs[t - 1, ids[t]].item() for t in places) / len(places)


@pytest.mark.parametrize("name", ["Qwen3", "Mistral"])
@pytest.mark.parametrize("budget", [None, 1])
def test_values_equal_one_plain_forward_per_boundary(name, budget):
    model = make_model(name)
    data = problem()
    means, _ = values_of(model, *data, measure="mean_logprob", token_budget=budget)
    chances, _ = values_of(model, *data, token_budget=budget)
    for mean, chance, prompt, completion, boundaries, probe in zip(means, chances, *data, strict=True):
        judged = [judged_mean(model, prompt, completion, t, probe) for t in boundaries]
        torch.testing.assert_close(mean, torch.tensor(judged), rtol=0, atol=2e-5)
        torch.testing.assert_close(chance, torch.tensor(judged).exp(), rtol=2e-5, atol=0)


def test_a_completion_and_its_probes_are_fed_once(qwen3):
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    probe = Probe(torch.tensor([9, 8, 7]), Span(1, 3))
    _, work = values_of(qwen3, [prompt], [completion], [[4, 10, 16]], [probe])
    # Prompt, the completion up to the last boundary, and of each probe all but the last token.
    assert work.tokens_fed == 9 + 16 + 3 * 2
    assert work.forwards == 1


def test_the_own_marker_and_answer_behind_the_whole_reasoning_are_the_completion_itself(qwen3):
    (prompt,), (completion,) = tokens(9), tokens(20, seed=5)
    answer = Span(16, 19)
    ((value,),), work = values_of(
        qwen3, [prompt], [completion], [[14]], [own_probe(completion, answer, 14)], measure="mean_logprob"
    )
    assert work.tokens_fed == 9 + 18
    assert abs(value.item() * 3 - naive(qwen3, prompt, completion, answer)) < 2e-5


def test_gains_are_differences_from_one_unit_to_the_next_and_sum_to_the_whole(qwen3):
    prompts, completions, _, probes = problem()
    units = [[Span(2, 5), Span(7, 12)], [Span(0, 33)], [], []]
    gains, work = gains_of(qwen3, prompts, completions, units, probes)
    values = [
        torch.tensor([judged_mean(qwen3, prompts[b], completions[b], t, probes[b]) for t in places]).exp()
        for b, places in enumerate([[2, 5, 12], [0, 33]])
    ]
    torch.testing.assert_close(gains[0], values[0].diff(), rtol=0, atol=1e-5)
    torch.testing.assert_close(gains[1], values[1].diff(), rtol=0, atol=1e-5)
    assert [len(gain) for gain in gains] == [2, 1, 0, 0]
    assert work.forwards == 1


def test_gains_feed_less_than_a_quarter_of_what_masked_branches_do(qwen3):
    """In the shape of a GSM8K solution: 108 tokens of prompt, 145 of completion, marker and answer in 4."""
    (prompt,), (completion,) = tokens(108), tokens(145, seed=5)
    units, answer = [Span(12, 33), Span(45, 60), Span(70, 92), Span(110, 135)], Span(142, 145)
    probe = own_probe(completion, answer, 141)
    _, work = gains_of(qwen3, [prompt], [completion], [units], [probe])
    masking = [
        score_counterfactuals(qwen3, [prompt], [completion], [row], [answer], placeholder_id=PLACEHOLDER).work
        for row in ([], units)
    ]
    base, exact = (work.tokens_fed for work in masking)
    assert work.tokens_fed - (108 + 135) == 5 * 3
    assert work.tokens_fed - (108 + 135) < 0.25 * (exact - base)


def test_a_batch_without_boundaries_costs_nothing(qwen3):
    prompts, completions, _, _ = problem()
    values, work = values_of(qwen3, prompts, completions, [[]] * 4, [None] * 4)
    assert work.forwards == 0
    assert [len(row) for row in values] == [0] * 4


def test_a_probe_scores_a_completion_up_to_its_end_of_text(qwen3):
    (prompt,), (completion, other) = tokens(9), tokens(20, 11, seed=5)
    completion[18:] = EOS
    probe = Probe(torch.tensor([9, 8, 7, 6]), Span(2, 4))
    completions, answers = with_probes([completion, other], [Span(3, 5), Span(8, 10)], [probe, None], [EOS])
    assert completions[0].tolist() == [*completion[:18].tolist(), 9, 8, 7, 6]
    assert answers == [Span(20, 22), Span(8, 10)]
    assert completions[1] is other
    span = Span(5, 9)
    scores = score_counterfactuals(qwen3, [prompt] * 2, completions, [[span], []], answers, placeholder_id=PLACEHOLDER)
    base = naive(qwen3, prompt, completions[0], answers[0])
    masked = naive(qwen3, prompt, completions[0], answers[0], span)
    assert abs(scores.base[0].item() - base) < 2e-5
    assert abs(scores.drop[0].item() - (masked - base)) < 4e-5


@pytest.mark.parametrize(("ids", "kept"), [([5, 2, 6, 2, 2], 3), ([2, 2], 0), ([5, 6], 2), ([5, 3, 2], 1)])
def test_only_the_end_of_text_tokens_at_the_end_are_left_out(ids, kept):
    assert length_without_eos(torch.tensor(ids), {2, 3}) == kept


def test_rows_with_another_rotary_frequency_are_asked_apart():
    """Beyond 24 tokens this model takes its other set of frequencies: each value is as if it were fed alone."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [6.0] * 8}
    model = make_model("Phi3", original_max_position_embeddings=24, rope_parameters=rope)
    (prompt,), (completion,) = tokens(9), tokens(33, seed=5)
    probe = Probe(torch.tensor([9, 8, 7]), Span(1, 3))
    boundaries = [5, 20, 11, 12, 13]
    (values,), _ = values_of(model, [prompt], [completion], [boundaries], [probe], measure="mean_logprob")
    judged = [judged_mean(model, prompt, completion, t, probe) for t in boundaries]
    torch.testing.assert_close(values, torch.tensor(judged), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probes": [None] * 4}, "probes row 0: is None, but the row has 3 boundaries"),
        (
            {"probes": [Probe(torch.zeros(2), Span(0, 1))] * 4},
            "probes row 0: must be a 1-D int64 tensor .* torch.float32",
        ),
        ({"probes": [Probe(torch.tensor([3]), Span(0, 2))] * 4}, r"probes row 0: target \(0, 2\) is not a non-empty"),
        (
            {"probes": [Probe(torch.tensor([VOCAB]), Span(0, 1))] * 4},
            "probes row 0: id 211 at position 0 is outside",
        ),
        ({"boundaries": [[3], [34], [], []]}, r"boundaries row 1: 34 is outside \[0, 33\]"),
        ({"boundaries": [[3], [-1], [], []]}, r"boundaries row 1: -1 is outside"),
        ({"probes": [Probe(torch.full((250,), 3), Span(0, 1))] * 4}, "probes row 0: .* are 257 tokens, more than"),
        ({"boundaries": [[3]]}, "boundaries has 1 rows, prompts has 4"),
        ({"measure": "odds"}, "measure must be one of probability, mean_logprob, got 'odds'"),
    ],
)
def test_bad_boundaries_and_probes_are_refused_by_row_and_value(qwen3, change, message):
    prompts, completions, boundaries, probes = problem()
    options = {"boundaries": boundaries, "probes": probes, **change}
    with pytest.raises(ValueError, match=message):
        values_of(qwen3, prompts, completions, **options)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([[Span(2, 5), Span(4, 6)]], r"units row 0, unit 1: \(4, 6\) is empty or starts before 5"),
        ([[Span(7, 9), Span(2, 4)]], r"units row 0, unit 1: \(2, 4\) is empty or starts before 9"),
    ],
)
def test_units_out_of_order_have_no_gain(qwen3, units, message):
    prompts, completions, _, probes = problem()
    with pytest.raises(ValueError, match=message):
        gains_of(qwen3, prompts, completions, [*units, [], [], []], probes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probes": [Probe(torch.tensor([3]), Span(1, 1))]}, r"probes row 0: target \(1, 1\)"),
        ({"spans": [[Span(0, 2), Span(3, 5)]]}, r"spans row 0, span 1: \(3, 5\) reaches the probe, which starts at 4"),
        ({"answers": []}, "answers has 0 rows, completions has 1; they must agree"),
    ],
)
def test_bad_probes_behind_completions_are_refused(arguments, message):
    given = {"answers": [None], "probes": [Probe(torch.tensor([3]), Span(0, 1))], **arguments}
    with pytest.raises(ValueError, match=message):
        with_probes([torch.tensor([4, 5, 6, 7, EOS])], **given, eos_ids=[EOS])


@pytest.mark.parametrize(("end", "answer"), [(5, Span(4, 6)), (3, Span(4, 9)), (-1, Span(4, 6))])
def test_an_own_probe_lies_inside_its_completion(end, answer):
    with pytest.raises(ValueError, match="reasoning_end and answer must be in order inside the 8 tokens"):
        own_probe(torch.arange(8), answer, end)


def test_a_nan_names_the_callers_row():
    model = make_model("Qwen3")
    prompts, completions, boundaries, probes = problem()
    values_of(model, prompts, completions, boundaries, probes)
    completions[2][14] = 210
    with torch.no_grad():
        model.get_input_embeddings().weight[210] = float("nan")
    with pytest.raises(FloatingPointError, match="completions row 2: the model gave a nan"):
        values_of(model, prompts, completions, boundaries, probes)
