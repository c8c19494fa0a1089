"""Token credit from groups of completions, against definitions written out and worked by hand."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfa_kernels import Batch, CounterfactualConfig, Span, counterfactual_credit
from cfa_kernels.estimators.siblings import (
    PrefixTreeValues,
    SiblingEdits,
    correct_siblings,
    edited_tokens,
    prefix_tree_values,
    sibling_edits,
)
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.access import InProcess
from tests.support.edit_table import edits_by_table, table
from tests.support.small_tokenizers import get_tokenizer

ROW = st.lists(st.integers(0, 2), max_size=7)
BATCH = st.lists(st.tuples(ROW, st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 0.1, 0.5, 1.0])), max_size=8)


def columns(batch):
    """Completions, groups, correctness and rewards of (row, group, correct, reward) tuples."""
    rows, groups, correct, rewards = zip(*batch, strict=True) if batch else ((), (), (), ())
    return (
        [torch.tensor(row, dtype=torch.int64) for row in rows], torch.tensor(groups, dtype=torch.int64),
        torch.tensor(correct, dtype=torch.bool), torch.tensor(rewards, dtype=torch.float64),
    )  # fmt: skip


def ids(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in text], dtype=torch.int64)


# Prefix tree


def values_by_definition(batch) -> list[list[float]]:
    """V(s) as the mean of exact rewards over the group's rows that begin with s, for every prefix s."""

    def value(prefix, group) -> Fraction:
        below = [Fraction(r) for row, g, _, r in batch if g == group and row[: len(prefix)] == prefix]
        return sum(below, Fraction()) / len(below)

    return [
        [float(value(row[: t + 1], group) - value(row[:t], group)) for t in range(len(row))]
        for row, group, _, _ in batch
    ]


@given(BATCH)
def test_a_token_is_worth_the_change_of_the_mean_reward_below_its_prefix(batch) -> None:
    completions, groups, _, rewards = columns(batch)
    for found, expected in zip(
        prefix_tree_values(completions, groups, rewards), values_by_definition(batch), strict=True
    ):
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx(expected, abs=1e-7)
        assert (found == 0).tolist() == [abs(value) < 1e-12 for value in expected]


# Edits


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_edited_tokens_are_those_of_an_alignment_by_the_full_table(ours, theirs) -> None:
    found = edited_tokens(torch.tensor(ours, dtype=torch.int64), torch.tensor(theirs, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert tuple(found.tolist()) in edits_by_table(ours, theirs)
    same = next(
        (t for t, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
    )
    assert not found[: min(same, len(ours) - 1)].any(), "a token before the first difference"


@given(BATCH)
def test_siblings_are_the_correct_ones_by_edit_distance(batch) -> None:
    completions, groups, correct, _ = columns(batch)
    expected = [
        []
        if right
        else sorted(
            (other for other, (_, g, c, _) in enumerate(batch) if g == group and c),
            key=lambda other: (table(row, batch[other][0])[-1][-1], batch[other][0]),
        )
        for row, group, right, _ in batch
    ]
    assert correct_siblings(completions, groups, correct) == expected
    edits = sibling_edits(completions, groups, correct)
    for (row, *_), near, found in zip(batch, expected, edits, strict=True):
        marks = edits_by_table(row, batch[near[0]][0]) if near else {(1.0,) * len(row)}
        assert tuple(found.tolist()) in marks


def test_a_completion_is_correct_from_the_threshold_of_its_reward_on() -> None:
    rows = Rows([ids("q")] * 2, [ids("ab"), ids("ac")])
    batch = Batch(rows, groups=[0, 0], rewards=[0.5, 0.4], units=[[Span(0, 1), Span(1, 2)]] * 2)
    assert [row.tolist() for row in SiblingEdits()(InProcess(None), batch).values] == [[1, 1], [0, 1]]


@pytest.mark.parametrize("estimator", [PrefixTreeValues(), SiblingEdits()])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": None}, "groups is None, and the estimator reads it"),
        ({"groups": torch.tensor([0.0, 0, 1])}, r"groups must be \(B,\) integers, got tensor"),
        ({"rewards": None}, "rewards is None, and the estimator reads it"),
        ({"rewards": torch.tensor([1, math.nan, 0])}, "rewards row 5: must be finite, got nan"),
    ],
)
def test_bad_groups_and_rewards_are_named(estimator, change, message) -> None:
    rows = [ids("ab"), ids("c"), ids("a")]
    batch = Batch(Rows(rows, rows, [4, 5, 6]))
    given_by_a_host = {"groups": torch.tensor([0, 0, 1]), "rewards": torch.tensor([1.0, 0, 1])}
    with pytest.raises(ValueError, match=message):
        estimator(InProcess(None), batch.with_columns(**given_by_a_host | change))


@pytest.mark.parametrize("name", ["prefix_tree", "sibling_edits"])
def test_a_batch_without_siblings_is_named_and_one_whose_siblings_have_no_reward_is_neutral(name) -> None:
    rows = Rows([ids("q")] * 4, [ids("ab"), ids("c"), ids("ad"), ids("ae")])
    advantages, config = torch.tensor([1.0, -1.0, 0.5, -0.5]), CounterfactualConfig(estimator=name)

    def credited(groups: torch.Tensor, rewards: list[float]) -> list[torch.Tensor]:
        columns = {"advantages": advantages, "groups": groups, "rewards": rewards, "config": config}
        credit = counterfactual_credit(None, get_tokenizer("byte-level, single digits"), rows, **columns)
        return [row * torch.ones(n) for row, n in zip(credit.applied_to(advantages), rows.lengths, strict=True)]

    with pytest.raises(ValueError, match="groups: no two completions are of one group"):
        credited(torch.arange(4), [1.0, 0.0, 1.0, 0.0])
    alone = credited(torch.tensor([0, 0, 1, 1]), [1.0, math.nan, math.nan, 0.0])
    assert [row.tolist() for row in alone] == [[1.0, 1.0], [-1.0], [0.5, 0.5], [-0.5, -0.5]]
