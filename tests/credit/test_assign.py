"""counterfactual_credit does the whole way of a batch, whatever the estimator and the rule for weights."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cfa_kernels.credit import units as units_module
from cfa_kernels.credit.assign import FIGURES, counterfactual_credit
from cfa_kernels.credit.config import CounterfactualConfig, SpanRules
from cfa_kernels.credit.weights import Range
from cfa_kernels.estimators.base import ESTIMATORS
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.model.check.accuracy import ACCURACY
from cfa_kernels.rows import Rows, pad_rows
from cfa_kernels.scoring.access import LogprobService
from cfa_kernels.span import Span
from cfa_kernels.text.find import Reasoning
from tests.support.plug_ins import TOTAL_EFFECTS
from tests.support.scored import Scored, importances_of
from tests.support.small_tokenizers import encode, get_tokenizer


class Tokenizer:
    pad_token_id, eos_token_id = None, 2


@pytest.fixture
def scored(monkeypatch):
    """A stand-in for detection, and an access that scores without a model."""

    def find_reasoning(rows, tokenizer, *, spans, **options):
        found = {}
        for b, ids in rows.items():
            answer = Span(len(ids) - 1, len(ids)) if len(ids) > 3 else None
            found_spans = [Span(0, 1), Span(1, 2)] if answer and spans else []
            found[b] = Reasoning(answer, len(ids) - 1 if answer else len(ids), found_spans)
        return found

    monkeypatch.setattr(units_module, "find_reasoning", find_reasoning)
    return Scored()


PROMPTS = torch.tensor([[0, 5, 6], [4, 5, 6], [0, 0, 6], [4, 4, 4]])
PROMPT_MASK = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]])
COMPLETIONS = torch.tensor([[7, 8, 9, 10, 2], [7, 8, 9, 11, 0], [7, 8, 0, 0, 0], [7, 8, 9, 10, 2]])
COMPLETION_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
MASKING = CounterfactualConfig()
ROWS = Rows.from_padded(PROMPTS, PROMPT_MASK, COMPLETIONS, COMPLETION_MASK)


def credited(access, *, rows=ROWS, config=MASKING, **given):
    """Credit of `rows` by an access to no model."""
    return counterfactual_credit(access, Tokenizer(), rows, config=config, **given)


def test_rows_are_scored_and_weighed_each_by_itself(scored):
    credit = credited(scored)
    expected = [[4.0, 0.5, 1, 1, 1.5], [4.0, 0.5, 1, 1.5, 1], [1] * 5, [4.0, 0.5, 1, 1, 1.5]]
    assert list(map(len, credit.weights)) == ROWS.lengths
    assert torch.equal(credit.padded(), torch.tensor(expected))
    assert torch.equal(credit.padded(7), torch.tensor([[*row, 1, 1] for row in expected]))
    with pytest.raises(ValueError, match="width must be at least 5, the longest row, got 3"):
        credit.padded(3)
    (batch,) = scored.batches
    assert [row.tolist() for row in batch.rows.prompts] == [[5, 6], [4, 5, 6], [4, 4, 4]]
    assert [row.tolist() for row in batch.scored.completions] == [[7, 8, 9, 10, 2], [7, 8, 9, 11], [7, 8, 9, 10, 2]]
    assert batch.answers == [Span(4, 5), Span(3, 4), Span(4, 5)]
    assert batch.placeholder == Tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("completions", "advantages", "two_dimensional"),
    [("all", [0.0, -1.0, 0.5, 0.0], False), ("positive", [-1.0, 2.0, 0.5, -0.5], True)],
)
def test_rows_without_an_advantage_to_judge_by_are_not_scored_and_weigh_one(
    scored, completions, advantages, two_dimensional
):
    advantages, config = torch.tensor(advantages), CounterfactualConfig(completions=completions)
    if two_dimensional:
        advantages = [row.expand(n) for row, n in zip(advantages, ROWS.lengths, strict=True)]
    credit = credited(scored, advantages=advantages, config=config)
    assert all(credit.weights[b].eq(1).all() and not credit.spans[b] for b in (0, 2, 3))
    assert credit.weights[1].tolist() == [4.0, 0.5, 1, 1.5]
    assert [batch.index for batch in scored.batches] == [[1]]


@pytest.mark.parametrize("signed", [False, True])
def test_open_spans_leave_their_first_token_to_the_weight_outside(scored, monkeypatch, signed):
    """The first token chooses what comes next; a span of one token keeps its weight."""
    spans = [Span(0, 3), Span(3, 4)]
    monkeypatch.setattr(
        units_module, "find_reasoning", lambda rows, *_, **__: {b: Reasoning(Span(4, 5), 4, spans) for b in rows}
    )
    estimator = importances_of(lambda batch: [[1.0, 2.0] for _ in batch.units], signed=signed)
    config, rows = CounterfactualConfig(estimator, open_spans=True), ROWS.take([0])
    credit = credited(scored, rows=rows, advantages=torch.ones(1), config=config)
    assert credit.spans == [spans], "what was judged is whole"
    found = credit.advantages if signed else credit.weights
    assert found[0].tolist() == ([1, 2, 2, 3, 1] if signed else [1, 0.5, 0.5, 4, 1.5])


@pytest.mark.parametrize("control", ["off", "random"])
def test_controls_that_ignore_the_drops_score_nothing(scored, control):
    credit = credited(scored, config=CounterfactualConfig(control=control))
    assert scored.batches == []
    assert credit.work is None
    if control == "off":
        assert credit.padded().eq(1).all()
    else:
        assert credit.weights[0][4] == 1.5
        assert credit.weights[2].ne(1).all()


def test_rows_are_not_padded_where_a_part_would_be_lost():
    with pytest.raises(ValueError, match=r"rows must share a dtype, got torch\.float32 and torch\.int64"):
        pad_rows([torch.tensor([1]), torch.tensor([1.5, 2.0])])


def test_an_empty_completion_gets_no_credit(scored):
    rows = Rows(ROWS.prompts, [ROWS.completions[0][:0], *ROWS.completions[1:]])
    credit = credited(scored, rows=rows)
    assert len(credit.weights[0]) == 0
    assert credit.weights[1][0] == 4.0


def test_permuted_weights_are_those_of_other_units_and_drops_stay_as_found(scored, monkeypatch):
    found = Reasoning(None, 40, [Span(2 * k, 2 * k + 2) for k in range(20)])
    monkeypatch.setattr(units_module, "find_reasoning", lambda rows, *_, **__: dict.fromkeys(rows, found))
    rows, squares = Rows([torch.tensor([1])] * 2, [torch.arange(40)] * 2), [float(k * k) for k in range(20)]
    estimator, draws, dealt = importances_of(lambda batch: [squares for _ in batch.units]), set(), set()
    for control, seed in ((None, 1), ("permuted", 1), ("permuted", 2)):
        credit = credited(scored, rows=rows, config=CounterfactualConfig(estimator, control=control), seed=seed)
        assert [row.tolist() for row in credit.drop] == [squares] * 2
        draws |= {tuple(row.tolist()) for row in credit.weights}
        dealt |= {tuple(sorted(row.tolist())) for row in credit.weights}
    assert (len(draws), len(dealt)) == (5, 1)  # one draw is without a control


def test_what_is_drawn_for_a_row_depends_on_the_seed_and_its_index_only(scored):
    config = CounterfactualConfig(control="random")
    whole, again, other = (credited(scored, config=config, seed=seed) for seed in ((1, 2), (1, 2), (1, 3)))
    part = credited(scored, rows=ROWS.take([3, 1]), config=config, seed=(1, 2))
    assert all(map(torch.equal, whole.weights, again.weights))
    assert torch.equal(part.weights[0], whole.weights[3])
    assert torch.equal(part.weights[1], whole.weights[1])
    assert not torch.equal(whole.weights[0], whole.weights[3])  # the same tokens at another index
    assert not any(torch.equal(one, two) for one, two in zip(whole.weights, other.weights, strict=True) if len(one) > 2)
    assert all(map(torch.equal, whole.weights, credited(scored, config=config, seed=np.array([1, 2])).weights))


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS.keys() - {"external", "sibling_edits"}))
def test_no_rows_get_no_credit(estimator):
    given = {"advantages": torch.zeros(0), "config": CounterfactualConfig(estimator=estimator)}
    credit = counterfactual_credit(None, Tokenizer(), Rows([], []), **given)
    assert (credit.spans, credit.base.shape, credit.work) == ([], (0,), None)
    assert (credit.advantages is not None) == (ESTIMATORS[estimator].weights is None)
    assert credit.padded(6).shape == (0, 6)
    assert credit.metrics([]) == {"credit/tokens_fed": 0.0, "credit/forwards": 0.0}  # others would be over nothing


def test_credit_metrics_describe_the_scored_rows(scored):
    metrics = credited(scored).metrics()
    assert metrics["credit/scored_fraction"] == 0.75
    assert metrics["credit/spans_mean"] == 2
    assert metrics["credit/drop_mean"] == 1.5
    assert metrics["credit/drop_max"] == 2.0
    assert metrics["credit/distractor_fraction"] == 0
    assert metrics["credit/weight_mean"] == (8 + 7 + 2 + 8) / 16
    assert metrics.keys() <= FIGURES.keys()


# Other estimators


def test_a_function_as_estimator_sees_every_completion_with_its_group_and_its_values_weigh_its_units(scored):
    estimate = importances_of(lambda batch: [[0.0, 3.0][: len(units)] for units in batch.units])
    config, groups = CounterfactualConfig(estimator=estimate), torch.tensor([0, 0, 1, 1])
    advantages, rewards = torch.tensor([1.0, -1.0, 0.0, 0.5]), torch.tensor([1.0, 0.0, 0.5, 1.0])
    credit = credited(scored, advantages=advantages, rewards=rewards, config=config, groups=groups)
    assert scored.batches == []
    batch = estimate.batch
    assert [len(row) for row in batch.scored.completions] == batch.rows.lengths == [5, 4, 2, 5]
    assert [len(row) for row in batch.units] == [2, 2, 0, 2]  # the third row has no advantage
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert torch.equal(batch.rewards, rewards)
    assert torch.equal(batch.advantages, advantages)
    assert credit.weights[0].tolist() == [0.5, 4.0, 1, 1, 1.5]
    assert credit.weights[2].eq(1).all()
    assert credit.drop[0].tolist() == [0, 3]


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("control", [None, "inverted", "permuted", "random", "off"])
def test_signed_values_are_added_to_the_advantages_of_their_units(scored, control, per_row):
    estimate = importances_of(lambda batch: [[2.0, -1.0][: len(units)] for units in batch.units], signed=True)
    config = CounterfactualConfig(estimator=estimate, control=control)
    own = torch.tensor([1.0, -1.0, 0.0, 0.5])
    advantages = own if per_row else [row.expand(n) for row, n in zip(own, ROWS.lengths, strict=True)]
    credit = credited(scored, advantages=advantages, config=config)
    assert credit.padded().eq(1).all()
    if control == "off":
        assert credit.advantages is None
        return
    added = [row - mine for row, mine in zip(credit.advantages, own, strict=True)]
    assert all(row[2:].eq(0).all() for row in added)
    assert added[2].eq(0).all()
    found = [added[b][:2].tolist() for b in (0, 1, 3)]
    if control in ("permuted", "random"):
        assert all(sorted(row) == [-1, 2] for row in found)
    else:
        sign = -1 if control == "inverted" else 1
        assert found == [[2 * sign, -1 * sign]] * 3


def test_signed_values_are_not_lost_where_weights_alone_are_asked_for(scored):
    estimate = importances_of(lambda batch: [[2.0, -1.0][: len(units)] for units in batch.units], signed=True)
    credit = credited(scored, advantages=torch.ones(4), config=CounterfactualConfig(estimator=estimate))
    with pytest.raises(ValueError, match=r"credit is signed, .* train on credit.applied_to\(advantages\)"):
        credit.as_weights()
    assert credited(scored).as_weights()[0].tolist() == [4.0, 0.5, 1, 1, 1.5]


def test_entropies_judge_every_token_and_the_top_share_of_the_batch_is_kept(scored):
    entropies = [torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([6.0, 7, 8, 9]), torch.tensor([10.0, 11]),
                 torch.tensor([12.0, 13, 14, 15, 16])]  # fmt: skip
    config = CounterfactualConfig.of({"estimator": "entropy", "weights.fraction": 0.25})
    credit = credited(scored, entropies=entropies, config=config)
    threshold = torch.quantile(torch.cat(entropies), 0.75)
    assert all(torch.equal(row, (own >= threshold).float()) for row, own in zip(credit.weights, entropies, strict=True))
    assert credit.work is None


@pytest.mark.parametrize(
    "weights",
    ["bilevel", "top", lambda values, units, answer, length: torch.ones(length), lambda *place: [1] * place[3]],
)
@pytest.mark.parametrize("control", [None, "inverted", "permuted", "random"])
def test_every_reshaping_runs_under_every_control_and_may_keep_the_mean(scored, control, weights):
    config = CounterfactualConfig(control=control, weights=weights, normalize="mean")
    credit = credited(scored, config=config, seed=1)
    assert len(scored.batches) == (control != "random")
    assert all(row.mean() == pytest.approx(1) for row in credit.weights)
    if weights == "bilevel" and control in (None, "inverted"):
        first, second = credit.weights[0][:2].tolist()
        assert (first > second) == (control is None)


ONE_GROUP = {"groups": torch.zeros(4, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({"estimator": "entropy"}, {}, "entropies is None, and the estimator reads it; pass entropies"),
        ({"estimator": "entropy_shaping"}, {"entropies": [*map(torch.ones, ROWS.lengths)]}, "advantages is None"),
        ({"completions": "positive"}, {}, "advantages must be given with completions='positive'"),
        ({"estimator": "prefix_tree"}, {"rewards": [1.0] * 4, **ONE_GROUP}, "advantages must be given: .* adds to"),
        ({}, {"advantages": torch.zeros(3)}, "advantages has 3 rows, prompts has 4; they must agree"),
        ({}, {"advantages": [1.0] * 4}, r"advantages row 0: .* or all rows one tensor \(4,\), got float"),
        ({}, {"advantages": torch.tensor(1.0)}, "advantages: must hold an item for each row, got Tensor"),
        ({}, {"advantages": torch.tensor([1, 0, 1, 1])}, "advantages must be floating point, got torch.int64; convert"),
        ({"control": "random"}, {"advantages": [torch.full((n,), math.inf) for n in ROWS.lengths]},
         "advantages row 0, token 0: must be finite, got inf"),
        ({}, {"mask": [torch.full((n,), 0.5) for n in ROWS.lengths]}, "mask row 0, token 0: must be 1 or 0, got 0.5"),
        ({}, {"seed": None}, "seed must be an integer or a sequence of integers, got None"),
        ({}, {"seed": 1.5}, "seed must be .* got 1.5"),
        ({}, {"groups": ["a"] * 4}, r"groups must be \(B,\) integers, got \['a', 'a', 'a', 'a'\]"),
        ({"estimator.placeholder_id": None, "tokenizer": None}, {}, "placeholder_id: the tokenizer has neither"),
        ({"estimator": "external"}, {"external": [[1.0, math.nan]] * 4}, "estimator, row 0, unit 1: must be finite"),
        ({"estimator": "external"}, {"external": [torch.ones(3)] * 4}, "external row 0: holds 3, not 2 or 5 numbers"),
        ({"estimator": "entropy"}, {"entropies": [torch.ones(4)] * 4}, r"entropies row 0: must be a tensor \(5,\)"),
        ({"estimator": importances_of(lambda batch: [])}, {}, "estimator: must return .* for each of 4, got 0 rows"),
        ({"estimator": lambda *_: None}, {}, "estimator: must return Importances, .* each of 4, got NoneType"),
        ({"estimator": lambda *_: [[1.0, "x"]] * 4}, {}, r"estimator, row 0: expected a number .* got \[1.0, 'x'\]"),
        ({"estimator": lambda *_: [torch.ones(2, 2)] * 4}, {}, r"estimator, row 0: gave shape \(2, 2\)"),
        ({"weights": lambda *_: None}, {}, "weights, row 0: expected a number .* 5 tokens, got None"),
        ({"weights": lambda *_: [1.0]}, {}, "weights, row 0: gave 1 numbers for 5 tokens"),
        ({}, {"rewards": [0.0, 1.0, None, 0.0]}, r"rewards: expected a number .*, got \[0.0, 1.0, None, 0.0\]"),
        ({"estimator": importances_of(lambda batch: [[1.0, math.nan][: len(u)] for u in batch.units])}, {},
         "estimator, row 0, unit 1: must be finite, got nan"),
        ({"weights": lambda *place: -torch.ones(place[3])}, {}, "weights, row 0, token 0: must be finite and not"),
    ],
)  # fmt: skip
def test_estimators_and_reshapings_that_cannot_be_used_say_why(scored, config, given, message):
    tokenizer = SimpleNamespace(pad_token_id=None, eos_token_id=None) if "tokenizer" in config else Tokenizer()
    config = CounterfactualConfig.of({path: value for path, value in config.items() if path != "tokenizer"})
    with pytest.raises(ValueError, match=message):
        counterfactual_credit(scored, tokenizer, ROWS, config=config, **given)


SIBLINGS = Rows([ROWS.prompts[b] for b in (1, 1, 3, 3)], ROWS.completions)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({"estimator": "gradient"}, "estimator='gradient': it needs gradients through the model itself, whole in this"),
        (TOTAL_EFFECTS, "estimator='total_effects': it needs the model itself in this process"),
    ],
    ids=str,
)
def test_what_needs_the_model_here_says_so_where_it_lies_in_other_processes(scored, config, needed):
    service = LogprobService(lambda *_: [])
    with pytest.raises(NotImplementedError, match=needed):
        counterfactual_credit(service, Tokenizer(), ROWS, config=CounterfactualConfig.of(config))


def test_figures_of_signed_credit_are_those_of_what_is_added(scored):
    config, advantages = CounterfactualConfig(estimator="prefix_tree"), torch.tensor([1.0, -1, 2, -2])
    given = {"rewards": torch.tensor([1.0, 0, 1, 0]), "groups": torch.tensor([0, 0, 1, 1])}
    credit = credited(scored, rows=SIBLINGS, config=config, advantages=advantages, **given)
    added = torch.cat([row - own for row, own in zip(credit.advantages, advantages, strict=True)])
    figures = credit.metrics()
    assert figures.keys() <= FIGURES.keys()
    assert figures["credit/added_abs_mean"] == pytest.approx(added.abs().mean().item())
    assert figures["credit/added_fraction"] == (added != 0).float().mean().item() > 0
    assert figures["credit/scored_fraction"] == 1
    assert not {"credit/weight_mean", "credit/drop_mean", "credit/distractor_fraction"} & set(figures)


@pytest.mark.parametrize(("outcome", "dtype"), [("logprob", torch.float32), ("mean_logprob", torch.bfloat16)])
def test_drops_within_rounding_weigh_alike_and_make_no_distractors(outcome, dtype):
    def credit(drop):
        return counterfactual_credit(
            Scored(drop, base=-10.0, dtype=dtype), get_tokenizer("characters"), rows,
            config=CounterfactualConfig(Masking(outcome), Range(min_spread=0.0), spans=SpanRules("math", 2, "last")),
        )  # fmt: skip

    ids = torch.tensor(encode(get_tokenizer("characters"), "1 + 1 = 2\n1 + 2 = 3\n#### 18"))
    rows = Rows([ids[:2]], [ids])
    limit = ACCURACY[dtype] * math.sqrt(2)  # a drop is a difference of two scores
    within, beyond = (credit([0.0, -share * limit]) for share in (0.9, 1.1))
    answer = within.answers[0]
    assert answer.end - answer.start == 2
    assert str(within.drop[0].tolist()) == "[0.0, 0.0]"  # no -0.0
    assert within.metrics()["credit/distractor_fraction"] == 0
    assert beyond.metrics()["credit/distractor_fraction"] == 0.5
    assert within.weights[0][: answer.start].eq(1).all()
    assert beyond.weights[0].aminmax() == (0.5, 4.0)
