"""Scoring by a host's own log-prob service: its work and what it refuses; folding and padding."""

import pytest
import torch
from torch import Tensor

from cfa_kernels import Batch, CounterfactualConfig, Credit, Rows, Span, fold_weights
from cfa_kernels.estimators.base import Importances
from cfa_kernels.integrations.credit import OFFERED_BY_A_SERVICE, credit_rows, unmet_needs
from cfa_kernels.scoring.access import LogprobService
from tests.support.log_prob_hosts import IMPOSSIBLE
from tests.support.models import naive_row
from tests.support.tiny import PHRASES, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

IDS = [tiny_tokenizer().get_vocab()[phrase] for phrase in PHRASES]
PROMPTS = [torch.tensor([3, 4, 5]), torch.tensor([9, 5, 10, 7]), torch.tensor([3, 4, 5]), torch.tensor([6, 3])]
COMPLETIONS = [torch.tensor([IDS[i] for i in row] + [1]) for row in ([0, 1, 2, 4], [2, 0, 1, 3, 5], [1, 3], [3, 4])]
SPANS = [[Span(0, 1), Span(1, 3)], [Span(0, 2)], [Span(0, 1)], []]
ANSWERS = [Span(3, 4), Span(3, 5), None, Span(1, 2)]


def service(prompts: list[Tensor], completions: list[Tensor]) -> list[Tensor]:
    model = tiny_model()
    return [naive_row(model, *row) for row in zip(prompts, completions, strict=True)]


BATCH = Batch(Rows(PROMPTS, COMPLETIONS), units=SPANS, answers=ANSWERS, placeholder=0)


def score(logprobs_of=service, **options):
    return LogprobService(logprobs_of).score(BATCH, **options)


def test_the_work_of_a_service_counts_every_sequence_in_full_and_up_to_the_answer():
    work = score().work
    assert work.forwards == 6
    assert work.tokens_fed == work.tokens_unshared == 3 * (3 + 4) + 2 * (4 + 5) + (2 + 2)


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda rows: rows[:-1], "6 sequences, got 5"),
        (lambda rows: [*rows, rows[0]], "6 sequences, got 7"),
        (lambda rows: [*rows[:4], rows[4][:-1], rows[5]], "the 5 tokens of sequence 4, got 4"),
        (lambda rows: None, "6 sequences, got NoneType"),
        (lambda rows: [*rows[:4], rows[4][:, None], rows[5]], r"sequence 4: gave shape \(5, 1\) .* the 5 tokens"),
        (lambda rows: [row * torch.nan for row in rows], "row 0, answer token 0: must be finite, got nan"),
    ],
)
def test_a_service_that_answers_something_else_is_an_error(spoiled, message):
    with pytest.raises(ValueError, match=f"^logprobs_of.*{message}"):
        score(lambda prompts, completions: spoiled(service(prompts, completions)))


def test_what_a_service_cannot_tell_is_refused():
    with pytest.raises(NotImplementedError, match="outcome='last' needs distributions over the vocabulary"):
        score(outcome="last")
    with pytest.raises(NotImplementedError, match="model: it is in other processes"):
        _ = LogprobService(service).model


def test_advantages_that_do_not_fit_the_weights_are_an_error_and_others_keep_their_dtype():
    with pytest.raises(ValueError, match=r"advantages must be \(B,\) or \(B, T\) .*\(4, 2\)"):
        fold_weights(torch.ones(2, 3), torch.ones(4, 2))
    with pytest.raises(ValueError, match="weights must be of class Tensor, got list"):
        fold_weights(torch.ones(1), [[1.0]])
    with pytest.raises(ValueError, match=r"weights row 1, token 1: must be finite and not negative, got -0\.5"):
        fold_weights(torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, -0.5]]))
    with pytest.raises(ValueError, match=r"advantages must be floating point, got torch.int64; convert them with"):
        fold_weights(torch.tensor([1, -1]), torch.full((2, 3), 0.5))
    credit = Credit.joined([2, 2], [])
    with pytest.raises(ValueError, match="advantages has 3 rows, prompts has 2"):
        credit.applied_to(torch.ones(3))
    assert fold_weights(torch.ones(2, dtype=torch.bfloat16), torch.full((2, 3), 0.5)).dtype == torch.bfloat16


def credited(rows, masks, advantages, config, groups):
    """Advantages and figures of rows with rewards of 1 and 0, by the service."""
    given = {"groups": torch.tensor(groups), "rewards": torch.tensor([1.0, 0.0])}
    service_access = LogprobService(service)
    return credit_rows(tiny_tokenizer(), rows, masks, advantages, service_access, config=config, seed=0, **given)


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        # The rewards lie 1 apart, the advantages of the rows 2: what a branch says of rewards counts twice.
        ([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], [[1.0, 2.0, 1.0], [-1.0, -2.0, -1.0]]),
        # Advantages of tokens have no such scale.
        ([[1.0, 1.5, 1.0], [-1.0, -1.0, 3.0]], [[1.0, 2.0, 1.0], [-1.0, -1.5, 3.0]]),
    ],
    ids=["of rows", "of tokens"],
)
def test_signed_credit_of_rows_is_in_the_units_of_their_advantages_and_leaves_what_does_not_count(advantages, expected):
    rows = Rows(PROMPTS[:2], [torch.tensor([IDS[0], IDS[i], IDS[3]]) for i in (1, 2)])
    masks = [torch.tensor([1, 1, 1]), torch.tensor([1, 1, 0])]
    config = CounterfactualConfig(estimator="prefix_tree")
    given, figures = credited(rows, masks, [torch.tensor(row) for row in advantages], config, [4, 4])
    assert [row.tolist() for row in given] == expected
    assert figures["credit/scored_fraction"] == 1


def test_a_function_of_the_callers_asks_the_service_in_the_models_place():
    def estimate(access, batch):
        scores = access.score(batch, mask=0)
        return Importances(scores.drop, base=scores.base, change_of="logprob")

    rows = Rows(PROMPTS[:2], COMPLETIONS[:2])
    masks = [torch.ones(len(row)) for row in rows.completions]
    advantages = [torch.full((len(row),), 1.0 - 2 * b) for b, row in enumerate(rows.completions)]
    by_name, by_function = (
        credited(rows, masks, advantages, CounterfactualConfig(estimator=one), [0, 1])[0]
        for one in ("masking", estimate)
    )
    assert len(by_name[0].unique()) > 1
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_function, strict=True))


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=str)
def test_what_a_service_does_not_offer_is_named_by_the_option_that_needs_it(options, message):
    found = unmet_needs(CounterfactualConfig.of(options), OFFERED_BY_A_SERVICE)
    if message is None:
        assert found == []
        return
    (said,) = found
    assert said.startswith(message)
    assert "which this trainer does not give; " in said
