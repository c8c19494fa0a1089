"""An estimator of one's own is a class and a line of the registry: configuration, hosts and weights find it there."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from cfa_kernels import CounterfactualConfig, counterfactual_credit
from cfa_kernels.credit.config import part_options
from cfa_kernels.credit.weights import Range
from cfa_kernels.estimators import ESTIMATORS
from cfa_kernels.estimators.base import ANSWER
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.access import DISTRIBUTIONS, LOGPROBS
from cfa_kernels.span import Span
from tests.conftest import REPOSITORY
from tests.support.small_tokenizers import encode, get_tokenizer

TOKENIZER = get_tokenizer("byte-level, single digits")


(BLOCK,) = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
PAGE = {"__package__": "cfa_kernels.estimators", "__name__": "cfa_kernels.estimators.lateness"}
exec(BLOCK, PAGE)


@dataclass(frozen=True)
class Lateness(PAGE["Lateness"]):
    """The estimator that CONTRIBUTING.md shows, with a need that some hosts do not meet."""

    needs = frozenset({ANSWER, DISTRIBUTIONS})


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, Lateness.name, Lateness)


def credit_of(access, config):
    ids = torch.tensor(encode(TOKENIZER, "3 + 4 = 7. Then 7 - 3 = 4.\n#### 4"))
    return counterfactual_credit(access, TOKENIZER, Rows([torch.tensor([3])], [ids]), config=config)


def test_a_name_and_options_by_path_find_it():
    config = CounterfactualConfig.of({"estimator": "lateness", "estimator.power": 2.0, "weights.w_max": 3.0})
    assert config == CounterfactualConfig(Lateness(2.0), Range(w_max=3.0))
    assert config.units == "tokens"
    assert ("estimator.power", Lateness) in [(path, part) for path, part, _ in part_options()]


def test_its_importances_become_the_weights_of_its_rule():
    access = SimpleNamespace(
        capabilities=frozenset({LOGPROBS, DISTRIBUTIONS}), module=None, dtype=torch.float32, run=lambda body: body(),
        apply=lambda estimator, batch: estimator(access, batch),
    )  # fmt: skip
    weights = {}
    for power in (1.0, 2.0):
        credit = credit_of(access, CounterfactualConfig(Lateness(power)))
        judged = len(encode(TOKENIZER, "3 + 4 = 7. Then 7 - 3 = 4.\n"))
        assert credit.spans[0] == [Span(t, t + 1) for t in range(judged)]  # up to the marker
        share = (torch.arange(judged) / (judged - 1)) ** power
        torch.testing.assert_close(credit.weights[0][:judged], 0.5 + 3.5 * share)
        assert credit.weights[0][credit.answers[0].start] == 1.5
        assert credit.drop[0].tolist() == [float(t) ** power for t in range(judged)]
        weights[power] = credit.weights[0]
    assert not torch.equal(weights[1.0], weights[2.0])
    inverted = credit_of(access, CounterfactualConfig(estimator="lateness", control="inverted"))
    assert inverted.weights[0][0] == 4.0
