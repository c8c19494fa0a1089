"""Scores from merged adapters are those of the adapters, each drop by one arithmetic, and change no backward."""

from contextlib import contextmanager

import pytest
import torch

from cfa_kernels import Batch, CounterfactualConfig, DeferredCredit, LogprobService, Span
from cfa_kernels.model import merged
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.access import InProcess, Sharded
from cfa_kernels.scoring.outcomes import OUTCOMES
from cfa_kernels.scoring.packed import packed_forward
from tests.support.adapted import adapted, tiny
from tests.support.log_prob_hosts import batch_rows
from tests.support.models import assert_same_gradients, batch, gradients
from tests.support.tiny import tiny_tokenizer

PROMPTS, COMPLETIONS, SPANS, ANSWERS = batch()
ROWS = Rows(PROMPTS, COMPLETIONS)
BATCH = Batch(ROWS, units=SPANS, answers=ANSWERS)
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "two adapters": {"adapters": 2},
    "bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
}

pytestmark = pytest.mark.usefixtures("unchecked")


def policy(kind: str = "lora", dtype: torch.dtype = torch.float32):
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"]} | KINDS[kind]
    return adapted(tiny(dtype, attention_bias=kind == "bias"), **options)


@pytest.fixture
def shifted(monkeypatch):
    """Merged weights that are far from the weights, so that what was computed from either shows."""
    merged_adapters = merged.merged_adapters

    @contextmanager
    def far(model):
        with merged_adapters(model) as layers:
            generator = torch.Generator().manual_seed(3)
            for name, weight in ModelWalk.of(model).model.named_parameters():
                if "base_layer" in name:
                    weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
            yield layers

    monkeypatch.setattr(merged, "merged_adapters", far)


@pytest.mark.parametrize(
    ("kind", "outcome", "mask"),
    [(kind, OUTCOMES[i], (3, "drop", "drop", 3)[i]) for i, kind in enumerate(KINDS)],
)
def test_merged_scores_are_those_of_the_adapters(kind, outcome, mask):
    causal = causal_lm(policy(kind))
    forward = packed_forward(causal, ROWS, keep_states=True)
    expected = forward.score(BATCH, mask=mask, outcome=outcome)
    for access in (forward, InProcess(causal)):
        for budget in (None, 20):
            scored = BATCH.with_columns(token_budget=budget)
            scores = access.score(scored, mask=mask, outcome=outcome, merge_adapters=True)
            torch.testing.assert_close(scores.base, expected.base, rtol=1e-5, atol=2e-5, equal_nan=True)
            torch.testing.assert_close(scores.drop, expected.drop, rtol=1e-5, atol=2e-5, equal_nan=True)


def test_the_unmasked_answer_is_fed_again_and_only_its_rows():
    causal = causal_lm(policy())
    forward = packed_forward(causal, ROWS, keep_states=True)
    work = [forward.score(BATCH, mask=3, merge_adapters=merges).work for merges in (False, True)]
    answers = sum(answer.end - answer.start for answer in ANSWERS if answer is not None)
    assert work[1].tokens_fed - work[0].tokens_fed == answers


def test_both_log_probs_of_a_drop_come_from_merged_weights(shifted):
    """A mask that changes nothing leaves no drop, nor one that makes what another row's forward has fed."""
    causal = causal_lm(policy())
    prompt, text = torch.tensor([5, 6]), torch.tensor([9, 9, 9, 9, 9, 7, 8, 9])
    shorter = torch.cat([text[:2], text[3:]])
    rows = Rows([prompt] * 2, [text, shorter])
    columns = {"units": [[Span(1, 3), Span(2, 3)], []], "answers": [Span(6, 8), Span(5, 7)]}
    forward = packed_forward(causal, rows, keep_states=True)
    as_is = forward.score(Batch(rows, **columns), mask=9)
    same = forward.score(Batch(rows, **columns), mask=9, merge_adapters=True)
    assert (same.base - as_is.base).abs().min() > 1e-2
    torch.testing.assert_close(same.drop[0], torch.zeros(2), rtol=0, atol=1e-5)
    dropped = forward.score(Batch(rows, **columns), mask="drop", merge_adapters=True)
    torch.testing.assert_close(dropped.masked[0][1], dropped.base[1], rtol=0, atol=1e-5)
    alone = packed_forward(causal, rows.take([0]), keep_states=True)
    one = Batch(rows.take([0]), units=columns["units"][:1], answers=columns["answers"][:1])
    assert (alone.score(one, mask="drop", merge_adapters=True).masked[0][1] - as_is.base[1]).abs() > 1e-2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_sees_the_weights_that_it_had(dtype, fails, monkeypatch):
    """The backward of the forward that was scored has the same bits, also after an error while scores were taken."""

    def gradients_of(*, scores: bool):
        model = policy(dtype=dtype)
        forward = packed_forward(causal_lm(model), ROWS, keep_states=True)
        if scores and fails:
            with monkeypatch.context() as broken:
                broken.setattr(type(forward.head), "logprobs", lambda self, states, targets: targets * torch.nan)
                with pytest.raises(FloatingPointError):
                    forward.score(BATCH, mask=3, merge_adapters=True)
        elif scores:
            assert forward.score(BATCH, mask=3, merge_adapters=True).drop[0].any()
        return gradients(model, sum(row.square().sum() for row in forward.logprobs()))

    assert_same_gradients(gradients_of(scores=True), gradients_of(scores=False), 0)


def test_what_does_not_hold_whole_weights_is_refused_before_it_is_asked():
    service = LogprobService(lambda *columns: pytest.fail("asked"))
    with pytest.raises(NotImplementedError, match="merge_adapters=True needs the model's weights, whole in"):
        service.score(BATCH, mask=3, merge_adapters=True)
    config = CounterfactualConfig.of({"estimator.merge_adapters": True})
    rows = Batch(batch_rows(), advantages=torch.ones(len(batch_rows())))
    for access in (service, Sharded(policy())):
        credit = DeferredCredit(config, tiny_tokenizer(), rows, seed=0)
        with pytest.raises(NotImplementedError, match="merge_adapters=True: it needs the model's weights, whole"):
            credit.by_model(access)
