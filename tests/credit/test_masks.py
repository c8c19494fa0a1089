"""What credit takes from text that the policy did not write, or only thought; and importances that hardly differ."""

import pytest
import torch

from cfa_kernels.credit.assign import counterfactual_credit
from cfa_kernels.credit.config import CounterfactualConfig
from cfa_kernels.model.check.accuracy import ACCURACY
from cfa_kernels.rows import Rows
from tests.support.scored import Scored, importances_of
from tests.support.small_tokenizers import encode, get_tokenizer

CHARACTERS = get_tokenizer("characters")
TURNS = [
    ("1 + 1 = 2. ", 1), ("3 * 6 = 18\n#### 18\n", 0), ("16 - 3 = 13. ", 1), ("#### 5", 1), (" eggs", 0), (" a day", 1),
]  # fmt: skip


def with_a_tool() -> tuple[Rows, list[torch.Tensor]]:
    row = torch.tensor([i for text, _ in TURNS for i in encode(CHARACTERS, text)])
    mask = torch.tensor([written for text, written in TURNS for _ in encode(CHARACTERS, text)])
    other = torch.tensor(encode(CHARACTERS, "1 + 2 = 3. #### 3"))
    return Rows([row[:2]] * 2, [row, other]), [mask, torch.ones(len(other))]


ESTIMATORS_OF_TEXT = [
    {"normalize": "mean"}, {"weights": "top"}, {"units": "tokens"}, {"control": "random", "normalize": "mean"},
    {"estimator": "prefix_gain"}, {"estimator": "entropy"}, {"estimator": "prefix_tree"},
    {"weights": lambda importances, units, answer, length: torch.full((length,), 2.0)},
]  # fmt: skip


@pytest.mark.parametrize("options", ESTIMATORS_OF_TEXT, ids=range(len(ESTIMATORS_OF_TEXT)))
def test_tokens_of_others_are_no_units_weigh_one_and_set_no_scale(options):
    rows, mask = with_a_tool()
    given = {
        "config": CounterfactualConfig.of(options), "advantages": torch.tensor([1.0, -1.0]), "rewards": [1.0, 0.0],
        "entropies": [torch.rand(n, generator=torch.Generator().manual_seed(n)) for n in rows.lengths],
    }  # fmt: skip
    access = Scored(torch.arange(60.0))
    credit = counterfactual_credit(access, CHARACTERS, rows, mask=mask, **given)
    written = mask[0].bool()
    units = [*credit.spans[0], *[credit.answers[0]] * (credit.answers[0] is not None)]
    assert all(written[slice(*unit)].all() for unit in units)
    if credit.added is not None:
        assert credit.added[0][~written].eq(0).all()
        return
    assert credit.weights[0][~written].eq(1).all()
    if options.get("normalize") == "mean":
        assert credit.weights[0][written].mean().item() == pytest.approx(1)
    if credit.answers[0] is not None:
        assert CHARACTERS.decode(rows.completions[0][slice(*credit.answers[0])]) == "5"


def test_advantages_of_zero_on_a_tools_tokens_say_as_much_as_a_mask():
    rows, mask = with_a_tool()
    advantages = [row * sign for row, sign in zip(mask, (1.0, -1.0), strict=True)]
    by_mask, by_advantages = (
        counterfactual_credit(Scored((2.0, 1.0)), CHARACTERS, rows, advantages=column, config="cf", **given)
        for column, given in ((torch.tensor([1.0, -1.0]), {"mask": mask}), (advantages, {}))
    )
    assert by_mask.spans == by_advantages.spans
    assert by_mask.answers == by_advantages.answers
    assert all(map(torch.equal, by_mask.weights, by_advantages.weights))
    assert [CHARACTERS.decode(rows.completions[0][slice(*span)]) for span in by_mask.spans[0]] == [
        "1 + 1 = 2", "16 - 3 = 13",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "dtype", "least"),
    [
        ({}, torch.float32, 0.1),
        ({"estimator.outcome": "mean_logprob"}, torch.bfloat16, 0.1),
        ({"weights.min_spread": 0.5}, torch.float32, 0.5),
        ({"weights.min_spread": 0.0}, torch.float32, 0.0),
    ],
)
@pytest.mark.parametrize("spread", [0.02, 0.4, 3.0])
def test_importances_that_hardly_differ_get_weights_that_hardly_do(options, dtype, least, spread):
    ids = torch.tensor(encode(CHARACTERS, "1 + 1 = 2\n1 + 2 = 3\n#### 18"))
    access = Scored([0.0, spread], base=-1.0, dtype=dtype)
    config = CounterfactualConfig.of(options)
    credit = counterfactual_credit(access, CHARACTERS, Rows([ids[:2]], [ids]), config=config)
    low, high = (credit.weights[0][span.start].item() for span in credit.spans[0])
    share = (min(1.0, spread / least) if least else 1.0) * (spread > ACCURACY[dtype] * 2**0.5)
    assert (low, high) == (pytest.approx(1 - 0.5 * share), pytest.approx(1 + 3 * share))


def test_importances_in_no_known_unit_get_the_whole_range_unless_the_option_says_otherwise():
    ids = torch.tensor(encode(CHARACTERS, "1 + 1 = 2\n1 + 2 = 3\n#### 18"))
    estimator = importances_of(lambda batch: [[0.0, 1e-3] for _ in batch.units])
    for options, expected in (({}, [0.5, 4.0]), ({"weights.min_spread": 2e-3}, [0.75, 2.5])):
        config = CounterfactualConfig.of({"estimator": estimator, **options})
        credit = counterfactual_credit(Scored(), CHARACTERS, Rows([ids[:2]], [ids]), config=config)
        assert [credit.weights[0][span.start].item() for span in credit.spans[0]] == pytest.approx(expected)
