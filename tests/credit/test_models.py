"""Credit of a small model by every estimator that runs it: probes, targets, fills, hosts."""

import pytest
import torch

from cfa_kernels import CounterfactualConfig, Span, counterfactual_credit
from cfa_kernels.estimators.prefix_gain import PrefixGain
from cfa_kernels.estimators.probes import Probe
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.access import InProcess, LogprobService
from tests.support.models import batch_of, make_model, naive_row, score_columns
from tests.support.small_tokenizers import encode, get_tokenizer

TOKENIZER = get_tokenizer("byte-level, single digits")
TEXTS = ["3 + 4 = 7. Then 7 - 3 = 4.\n#### 4", "4 + 4 = 8. Then 8 - 3 = 5.\n#### 5", "3 + 4 = 7. Then 7 - 3 = 4."]


@pytest.fixture(scope="module")
def model():
    return make_model("Qwen3", vocab_size=len(TOKENIZER)).eval()


@pytest.fixture(scope="module")
def batch():
    prompts = [torch.tensor(encode(TOKENIZER, "What is 3 + 4, less 3?"))] * len(TEXTS)
    completions = [torch.tensor([*encode(TOKENIZER, text), TOKENIZER.eos_token_id]) for text in TEXTS]
    return prompts, completions, Rows(prompts, completions)


def gain_of(model, prompt, completion, units, answer, end):
    rows = batch_of(model, [prompt], [completion], [units], [answer], reasoning_ends=[end])
    (values,) = PrefixGain()(InProcess(model), rows).values
    return values


def credit_of(model, batch, config=None, **given):
    return counterfactual_credit(model, TOKENIZER, batch[2], config=config or CounterfactualConfig(), **given)


def test_a_host_that_gives_log_probs_alone_finds_the_same_prefix_gains_and_mean_drops(model, batch):
    service = LogprobService(lambda *columns: [naive_row(model, *row) for row in zip(*columns, strict=True)])
    for config in (
        CounterfactualConfig(estimator="prefix_gain"),
        CounterfactualConfig.of({"estimator.outcome": "mean_logprob"}),
        CounterfactualConfig(),
    ):
        there = counterfactual_credit(service, TOKENIZER, batch[2], config=config)
        here = credit_of(model, batch, config)
        torch.testing.assert_close(there.drop, here.drop, rtol=0, atol=2e-5)
    with pytest.raises(NotImplementedError, match="outcome='mean'"):
        counterfactual_credit(
            service, TOKENIZER, batch[2], config=CounterfactualConfig.of({"estimator.outcome": "mean"})
        )


def test_a_probe_gives_an_answer_to_a_completion_without_one(model, batch):
    prompts, completions, _ = batch
    ids = torch.tensor(encode(TOKENIZER, "#### 4"))
    probe = Probe(ids, Span(len(ids) - 1, len(ids)))
    credit = credit_of(
        model, batch, probes=[None, None, probe], config=CounterfactualConfig.of({"weights.min_spread": 0.0})
    )
    assert len(credit.spans[2]) > 1
    assert credit.answers[2] is None
    kept = completions[2][:-1]  # without its end of text
    asked = torch.cat([kept, ids])
    expected = score_columns(
        model, prompts[:1], [asked], [credit.spans[2]], [Span(len(asked) - 1, len(asked))],
        mask=TOKENIZER.pad_token_id,
    )  # fmt: skip
    torch.testing.assert_close(credit.drop[2], expected.drop[0])
    assert len(credit.weights[2]) == len(completions[2])
    assert credit.weights[2].max() == 4
    assert all(map(torch.equal, credit.weights[:2], credit_of(model, batch).weights[:2]))


def test_a_target_is_scored_in_the_place_of_the_answer(model, batch):
    prompts, completions, _ = batch
    right = torch.tensor(encode(TOKENIZER, "8"))
    credit = credit_of(model, batch, targets=[right, None, None])
    answer = credit.answers[0]
    other = torch.cat([completions[0][: answer.start], right])
    expected = score_columns(
        model, prompts[:1], [other], [credit.spans[0]], [Span(answer.start, answer.start + len(right))],
        mask=TOKENIZER.pad_token_id,
    )  # fmt: skip
    torch.testing.assert_close(credit.drop[0], expected.drop[0])
    assert not torch.equal(credit.drop[0], credit_of(model, batch).drop[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"targets": [torch.ones(1)] + [None] * 2}, r"targets row 0: must be a 1-D int64 tensor .* got torch.float32"),
        (
            {"targets": [torch.ones(1).long()] * 3, "probes": [Probe(torch.ones(1).long(), Span(0, 1))] + [None] * 2},
            "targets row 0: has a probe too",
        ),
        ({"probes": [None, Probe(torch.ones(1).long(), Span(0, 2)), None]}, "probes row 1: target"),
        ({"probes": [(torch.ones(2).long(), (0, 1)), None, None]}, "probes row 0 must be of class Probe, got tuple"),
        ({"probes": [Probe(torch.tensor([9**9]), Span(0, 1)), None, None]}, "probes row 0: id 387420489 at position 0"),
        ({"targets": [torch.tensor([9**9]), None, None]}, "targets row 0: id 387420489 at position 0 is outside"),
        (
            {"config": CounterfactualConfig.of({"estimator.placeholder_id": 9**9})},
            "placeholder_id: id 387420489 .* is outside",
        ),
    ],
)
def test_bad_probes_and_targets_are_refused_by_row(model, batch, given, message):
    with pytest.raises(ValueError, match=message):
        credit_of(model, batch, **given)
