"""Credit of turns against the same questions asked of one unpacked row after the other, and what it may not do."""

import copy
import functools
import math
import statistics

import pytest
import torch

from cfa_kernels.credit.assign import counterfactual_credit
from cfa_kernels.credit.config import CounterfactualConfig
from cfa_kernels.credit.weights import SignGate, WeightInputs
from cfa_kernels.rows import Rows
from cfa_kernels.span import Span
from tests.support.models import float64_throughout, make_model, naive_row
from tests.support.scored import Scored
from tests.support.small_tokenizers import encode, get_tokenizer

CHARACTERS = get_tokenizer("characters")
PAD = CHARACTERS.pad_token_id
ROLLOUTS = [
    [("look up 1+1. ", 1), ("[2]", 0), ("times 3: 2*3. ", 1), ("[6] and", 0), (" so\n", 1), ("[ok]", 0), ("#### 6", 1)],
    [("[hello]", 0), ("first 4. ", 1), ("[no]", 0), ("I do not know", 1)],
    [("only one turn 5.\n#### 5", 1), ("</end>", 0)],
]
ROLLOUTS[2] = ROLLOUTS[2][:1]


def ids(text: str) -> torch.Tensor:
    return torch.tensor(encode(CHARACTERS, text))


def problem():
    rows = [torch.cat([ids(text) for text, _ in rollout]) for rollout in ROLLOUTS]
    masks = [torch.cat([torch.full((len(ids(text)),), w) for text, w in rollout]) for rollout in ROLLOUTS]
    return Rows([ids("What?")] * len(rows), rows), masks


def written(rollout) -> list[Span]:
    spans, at = [], 0
    for text, own in rollout:
        if own:
            spans.append(Span(at, at + len(ids(text))))
        at += len(ids(text))
    return spans


@pytest.fixture(scope="module")
def model():
    return make_model("Qwen3", vocab_size=128)


copied = functools.cache(copy.deepcopy)


def exact(model, pieces: list[torch.Tensor], answer: torch.Tensor) -> torch.Tensor:
    """Log-probs of an answer's tokens after pieces of text, by one plain forward in float64."""
    with float64_throughout(copied(model)) as precise:
        return naive_row(precise, ids("What?"), torch.cat([*pieces, answer]))[-len(answer) :]


def drops(model, rollout, answer: str, options) -> torch.Tensor:
    """Drops of the turns before the last one, each edited row a forward of its own."""
    texts, own = [ids(text) for text, _ in rollout], [w for _, w in rollout]
    marker = [ids("#### ")] if rollout[-1][0].startswith("####") else [texts[-1]]
    before, target = texts[:-1], ids(answer)
    base, result = exact(model, [*before, *marker], target).sum(), []
    judged = [k for k in range(len(before)) if own[k]] + [len(before)] * (rollout[-1][0] == marker[0])
    for k in judged:
        edited = list(before)
        gone = (
            [k, k + 1] if options.get("estimator.mask_observation") and k + 1 < len(before) and not own[k + 1] else [k]
        )
        for j in gone:
            edited[j] = edited[j][:0] if options.get("estimator.mask") == "drop" else torch.full_like(edited[j], PAD)
        result.append(base - exact(model, [*edited, *marker], target).sum())
    return torch.stack(result)


WAYS = [{"estimator.mask": mask, "estimator.mask_observation": mask == "drop"} for mask in ("placeholder", "drop")]


@pytest.mark.parametrize(("options", "gold"), [(WAYS[0], "81"), (WAYS[1], None)], ids=str)
def test_a_masked_turn_costs_its_answer_what_it_costs_an_unpacked_row(model, options, gold):
    rows, masks = problem()
    config = CounterfactualConfig.of({"units": "turns", "target": "gold" if gold else "answer", **options})
    credit = counterfactual_credit(
        model, CHARACTERS, rows, config=config, mask=masks, targets=[gold] * 3 if gold else None
    )
    assert credit.spans[0] == written(ROLLOUTS[0])[:-1]
    torch.testing.assert_close(
        credit.drop[0].double(), drops(model, ROLLOUTS[0], gold or "6", options), rtol=0, atol=4e-5
    )
    assert credit.work.forwards == 1


def test_turns_without_an_answer_are_judged_by_a_gold_one_after_their_end(model):
    rows, masks = problem()
    config = CounterfactualConfig(units="turns", target="gold")
    credit = counterfactual_credit(model, CHARACTERS, rows, config=config, mask=masks, targets=[ids("81")] * 3)
    assert credit.spans[1] == written(ROLLOUTS[1])
    texts = [ids(text) for text, _ in ROLLOUTS[1]]
    base = exact(model, texts, ids("81")).sum()
    for k, drop in zip((1, 3), credit.drop[1], strict=True):
        edited = [torch.full_like(text, PAD) if j == k else text for j, text in enumerate(texts)]
        assert drop.item() == pytest.approx((base - exact(model, edited, ids("81")).sum()).item(), abs=4e-5)
    own = counterfactual_credit(model, CHARACTERS, rows, config=CounterfactualConfig(units="turns"), mask=masks)
    assert own.spans[1] == []
    assert own.weights[1].eq(1).all()


def test_progress_is_the_log_ratio_of_policy_and_reference_summed_over_a_turn():
    rows, masks = problem()
    draws = torch.Generator().manual_seed(0)
    own, reference = ([-torch.rand(n, generator=draws) for n in rows.lengths] for _ in range(2))
    columns = {"mask": masks, "old_logprobs": own, "ref_logprobs": reference}
    credit = counterfactual_credit(
        None, CHARACTERS, rows, advantages=torch.tensor([1.0, -1.0, 1.0]), config=CounterfactualConfig("progress"),
        **columns,
    )  # fmt: skip
    for b, rollout in enumerate(ROLLOUTS):
        assert credit.spans[b] == written(rollout)
        ratios = (own[b].double() - reference[b].double()).tolist()
        assert credit.drop[b].tolist() == pytest.approx([sum(ratios[slice(*turn)]) for turn in written(rollout)])
    right, wrong = (max(range(n), key=credit.drop[b].__getitem__) for b, n in ((0, 4), (1, 2)))
    assert credit.weights[0][credit.spans[0][right].start] == 4  # most of a right rollout's advantage
    assert credit.weights[1][credit.spans[1][wrong].start] == 0.5  # least of a wrong one's
    own[1][8] = float("nan")
    with pytest.raises(ValueError, match="old_logprobs - ref_logprobs, row 1, token 8: must be finite, got nan"):
        counterfactual_credit(None, CHARACTERS, rows, config=CounterfactualConfig("progress"), **columns)


@pytest.mark.parametrize(("strength", "advantage", "by_token"), [(0.5, 1.5, False), (3.0, -0.7, True)])
def test_redistributed_advantages_keep_their_sum_and_are_constant_in_a_turn(strength, advantage, by_token):
    rows, masks = problem()
    advantages = torch.tensor([advantage, -advantage, 0.0])
    column = [value * mask for value, mask in zip(advantages, masks, strict=True)] if by_token else advantages
    config = CounterfactualConfig.of({"units": "turns", "weights": "redistribute", "weights.strength": strength})
    credit = counterfactual_credit(
        Scored((3.0, 1.0, -0.5)), CHARACTERS, rows, advantages=column, config=config, mask=masks
    )
    sizes = [end - start for start, end in written(ROLLOUTS[0])[:3]]
    mean = (3.0 * sizes[0] + sizes[1] - 0.5 * sizes[2]) / sum(sizes)
    largest = max(abs(value - mean) for value in (3.0, 1.0, -0.5))
    for turn, value in zip(credit.spans[0], (3.0, 1.0, -0.5), strict=True):
        expected = advantage * (1 + strength * (value - mean) / largest)
        assert credit.advantages[0][slice(*turn)].tolist() == pytest.approx(
            [expected] * (turn.end - turn.start), abs=1e-6
        )
    assert credit.advantages[0][masks[0].bool()].sum().item() == pytest.approx(advantage * int(masks[0].sum()))
    assert credit.added[0][~masks[0].bool()].eq(0).all()
    assert credit.weights[0].eq(1).all()
    assert credit.added[1].eq(0).all()


def test_a_turn_that_helps_the_gold_answer_gets_less_of_a_negative_advantage():
    rows, masks = problem()
    for weights, read in (("redistribute", "advantages"), ("range", "weights")):
        config = CounterfactualConfig(units="turns", target="gold", weights=weights)
        credit = counterfactual_credit(
            Scored((2.0, 0.0)), CHARACTERS, rows, advantages=torch.tensor([0.0, -1.0, 0.0]), config=config, mask=masks,
            targets=[None, "81", None],
        )  # fmt: skip
        helps, harms = (getattr(credit, read)[1][turn.start].item() for turn in credit.spans[1])
        assert (helps > harms) if read == "advantages" else (helps < harms)


def test_the_gate_of_signs_adds_what_scaling_within_a_group_leaves_of_each_turn():
    groups = {7: [[2.0, 1.0, -0.1], [0.3], []], 3: [[-1.5, 0.25]], 1: [[0.0, 0.0]]}
    rows, expected = [], []
    for group, members in groups.items():
        for values in members:
            units = [Span(2 * k, 2 * k + 2) for k in range(len(values))]
            rows.append(WeightInputs(torch.tensor(values), units, None, 8, advantage=-2.0, group=group))
        every = [value for values in members for value in values]
        scale = statistics.median([abs(value) for value in every if value] or [1.0])
        bounded = [math.tanh(value / scale) for value in every]
        mean, deviation = statistics.mean(bounded), statistics.pstdev(bounded) + 1e-6
        scaled = {value: (math.tanh(value / scale) - mean) / deviation for value in every}
        for values in members:
            gated = [scaled[value] if scaled[value] * value > 0 else 0.0 for value in values]
            expected.append([0.8 * x for x in gated for _ in range(2)] + [0.0] * (8 - 2 * len(values)))
    order = [3, 0, 4, 1, 2]
    added = SignGate(strength=0.8)([rows[i] for i in order], inverted=False)
    for row, i in zip(added, order, strict=True):
        assert row.tolist() == pytest.approx(expected[i])
    assert expected[1][0] == 0 != expected[0][0]  # below the group's mean, though it helps
    turned = SignGate(strength=0.8)([row._replace(importances=-row.importances) for row in rows], inverted=True)
    assert all(row.tolist() == pytest.approx(own) for row, own in zip(turned, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({}, {"mask": None}, "mask must be given with units='turns'"),
        ({}, {"mask": "none"}, "mask: holds no token of the policy in any row"),
        ({"target": "gold"}, {}, "targets must be given with target='gold'"),
        ({"target": "gold"}, {"targets": ["6", None, "5"]}, "targets row 11: is None, but the row has units"),
        ({"target": "gold"}, {"targets": ["6", "", "5"]}, "targets row 11: is empty"),
        ({"target": "gold"}, {"targets": ["6", "5" * 300, "5"]}, "completions row 11: .* exceed the model's context"),
        ({"target": "gold"}, {"targets": [torch.tensor([9999])] * 3}, "targets row 10: id 9999 at position 0 is outs"),
        ({"weights": "sign_gate"}, {"groups": torch.arange(3)}, "groups: no two completions are of one group"),
    ],
)  # fmt: skip
def test_bad_columns_are_named_by_row_before_anything_is_fed(model, options, columns, message):
    rows, masks = problem()
    rows = Rows(rows.prompts, rows.completions, [10, 11, 12])
    given = {"mask": masks} | columns
    if given["mask"] == "none":
        given["mask"] = [torch.zeros(n) for n in rows.lengths]
    with pytest.raises(ValueError, match=message):
        counterfactual_credit(
            model, CHARACTERS, rows, config=CounterfactualConfig.of({"units": "turns"} | options), **given
        )
