"""Total effects by masking equal full forwards and plain sums, and see what direct effects do not."""

import math
from types import SimpleNamespace

import pytest
import torch

from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.masked import ScoringWork
from cfa_kernels.span import Span
from examples.estimators.total_effects import total_effects
from tests.support.models import HYBRIDS, PLACEHOLDER, batch_of, make_model, naive_rows, score_columns, tokens


def exact(name="Qwen3", **changes):
    """In float64, and less sure of anything than the other tests' models: a negative total is exponentiated."""
    return make_model(name, initializer_range=0.1, **changes).cpu().double().eval()


@pytest.fixture(scope="module")
def qwen3():
    return exact()


def batch():
    """Units that touch, leave gaps, touch the answer, stand behind it, are out of order; equal rows; no answer."""
    first, second = tokens(7, 11)
    completions = tokens(20, 24, 12, 14, seed=15)
    prompts = [first, second, first.clone(), second, first]
    completions.append(completions[0].clone())
    answers = [Span(15, 18), Span(20, 23), Span(0, 2), None, Span(15, 18)]
    units = [
        [Span(1, 4), Span(4, 9), Span(11, 12), Span(14, 15), Span(18, 20)], [Span(9, 16), Span(0, 5), Span(6, 7)],
        [Span(5, 8)], [Span(1, 4), Span(6, 7)], [Span(1, 4), Span(5, 15)],
    ]  # fmt: skip
    return prompts, completions, units, answers


def effects(model, rows, *, access=None, **options):
    """What was found, with the columns of its details, in the order of `rows`."""
    given = batch_of(model, *rows, **options)
    found = total_effects(access or InProcess(model), given)
    return SimpleNamespace(total=found.values, base=found.base, work=found.work, **found.details)


# --- The definition, slowly ---------------------------------------------------------------------------------------


def plain_total(direct, links):
    """From the last unit to the first, each later unit a way to the answer."""
    total = list(direct)
    for i in reversed(range(len(direct))):
        for j in range(i + 1, len(direct)):
            total[i] += (1 - math.exp(-links[i][j])) * max(0.0, total[j])
    return total


def plain_effects(model, prompt, completion, units, answer):
    """The answer's log-prob, totals and direct effects of all units, and links by pairs of units, by position."""
    before = sorted(unit for unit in units if unit.start < answer.start)

    def logprob(masked, span):
        return sum(lines[masked][span.start : span.end])

    judged = [None, *before]
    lines = dict(zip(judged, naive_rows(model, prompt, completion, judged).tolist(), strict=True))
    direct = [logprob(None, answer) - logprob(unit, answer) for unit in before]
    links = [
        [max(0.0, logprob(None, later) - logprob(unit, later)) / (later.end - later.start) for later in before]
        for unit in before
    ]
    total = plain_total(direct, links)
    pairs = {(before[i], before[j]): links[i][j] for i in range(len(before)) for j in range(i + 1, len(before))}
    return logprob(None, answer), dict(zip(before, total, strict=True)), dict(zip(before, direct, strict=True)), pairs


def assert_equal(found, model, rows, tolerance=2e-5):
    for b, (prompt, completion, units, answer) in enumerate(zip(*rows, strict=True)):
        if answer is None:
            assert found.base[b].isnan()
            assert all(values[b].isnan().all() for values in (found.total, found.direct, found.links))
            assert found.total[b].shape == (len(units),)
            continue
        base, total, direct, links = plain_effects(model, prompt, completion, units, answer)
        assert found.base[b].item() == pytest.approx(base, abs=tolerance)
        for k, unit in enumerate(units):
            assert found.total[b][k].item() == pytest.approx(total.get(unit, 0.0), abs=tolerance)
            assert found.direct[b][k].item() == pytest.approx(direct.get(unit, 0.0), abs=tolerance)
            for other, later in enumerate(units):
                expected = links.get((unit, later), 0.0)
                assert found.links[b][k, other].item() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("name", "changes"), [("Qwen3", {}), ("Lfm2", HYBRIDS["Lfm2"])])
def test_effects_equal_full_forwards_summed_up_by_hand(name, changes):
    model, rows = exact(name, **changes), batch()
    found = effects(model, rows)
    assert_equal(found, model, rows)
    assert found.work == score_columns(model, *rows, mask=PLACEHOLDER).work
    assert (torch.cat(found.total) - torch.cat(found.direct)).nan_to_num().max() > 0.01
    assert all(values.dtype == torch.float32 for values in (found.base, *found.total, *found.direct, *found.links))


# --- The rule -----------------------------------------------------------------------------------------------------


def test_a_step_that_matters_only_through_the_next_has_no_direct_effect_and_a_total_one(qwen3):
    """A language in which a token is sure as long as the token that it was copied from still stands."""
    prompt, completion = torch.tensor([5]), torch.tensor([20, 7, 20, 8, 20, 9, 30])
    sources = {2: 0, 4: 2}  # of positions in the completion: the step, its repetition, the answer

    def logprobs_of(units, **_):
        def of(query):
            places = range(query.first, query.first + len(query.targets))
            kept = [t not in sources or query.tokens[1 + sources[t]] == completion[sources[t]] for t in places]
            return torch.tensor([math.log(0.9 if one else 0.01) for one in kept])

        return [[of(query) for query in unit] for unit in units], ScoringWork()

    units = [Span(0, 1), Span(1, 2), Span(2, 3), Span(3, 4)]  # step, filler, repetition, filler
    access = SimpleNamespace(query=logprobs_of)
    found = effects(qwen3, ([prompt], [completion], [units], [Span(4, 5)]), access=access)
    lost = math.log(90)
    assert found.direct[0].tolist() == pytest.approx([0, 0, lost, 0], abs=1e-6)
    assert found.total[0].tolist() == pytest.approx([89 / 90 * lost, 0, lost, 0], abs=1e-6)
