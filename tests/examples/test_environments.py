"""Turns of an environment in the training program: what it wrote is sampled after, and not trained on."""

import time
from typing import Any

import pytest
import torch

from cfa_kernels import packed_logprobs
from examples.environments import Calculator, EnvironmentFailure, PlayedEngine
from tests.support.embedded import all_counted, settings, updated
from trainer.rollouts.engine import end_ids
from trainer.run import set_up
from trainer.step import counted_tokens


@pytest.fixture(scope="module")
def played() -> Any:
    return set_up(settings("--config=calculator", "--estimator=masking", "--top_p=0.9"))


@pytest.fixture(scope="module")
def rollouts(played: Any) -> Any:
    """Eight completions of each of two problems, as a step draws them."""
    return played.sample([(0, 1, i, g) for i in range(2) for g in range(8)])


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("He pays <<48/2=", "24>>"), ("That leaves 93-66=", "27"), ("<<12/60=", "0.2>>"), ("3+4*2-6/3=", "9"),
        ("<<0.2*50=", "10>>"), ("7/0=", "undefined"), ("2-3+4=", "3"), ("1-10=", "-9"), ("3+4=7 and 7*2=", "14"),
        ("48/2 is", "no sum"),
    ],
)  # fmt: skip
def test_the_calculator_completes_the_last_sum(text, result):
    environment = Calculator()
    assert environment.reset(question="read by none") is None
    assert environment.step(text) == result


def test_a_call_is_answered_and_the_policy_goes_on_after_the_answer(played, rollouts):
    texts = dict.fromkeys(rollouts.texts)
    sums = [line for text in texts for line in text.split("\n") if "=" in line and line.rstrip().endswith(".")]
    assert len(sums) > 8
    calculator, tokenizer = Calculator(), played.tokenizer
    for line in sums:
        left, _, right = line.partition("=")
        assert right.split()[0] == calculator.step(f"{left}=")
    for ids, mask, logprobs in zip(rollouts.ids(), rollouts.mask, rollouts.logprobs, strict=True):
        assert len(ids) == len(mask) == len(logprobs) <= played.config.max_completion_length
        assert (logprobs[mask == 0] == 0).all()
        starts = [t for t in range(1, len(ids)) if not mask[t] and mask[t - 1]]
        assert all(tokenizer.decode(ids[:t]).endswith("=") for t in starts)
    assert any((mask == 0).any() for mask in rollouts.mask)


def test_log_probs_are_those_of_the_policy_with_the_observations_in_its_context(played, rollouts):
    values = packed_logprobs(played.policy, rollouts.rows, kept_tokens=rollouts.kept_tokens)
    for mask, own, expected in zip(rollouts.mask, rollouts.logprobs, values, strict=True):
        torch.testing.assert_close(own[mask == 1], expected[mask == 1].detach(), rtol=1e-3, atol=1e-3)
    for mask, kept in zip(rollouts.mask, rollouts.kept_tokens, strict=True):
        mass = torch.zeros(len(mask)).index_add_(0, kept.tokens(), kept.logprobs.exp())
        torch.testing.assert_close(mass, mask.float())


def test_tokens_of_an_environment_are_in_no_span_and_move_nothing(played, rollouts):
    batch = all_counted(rollouts)
    assert (
        counted_tokens(batch, range(16)) == sum(int(mask.sum()) for mask in rollouts.mask) < sum(rollouts.rows.lengths)
    )
    credit, metrics = updated(played, rollouts)
    units = [(mask, unit) for mask, row in zip(rollouts.mask, credit.spans, strict=True) for unit in row]
    assert units
    assert all(mask[unit.start : unit.end].all() for mask, unit in units)
    assert metrics["grad_norm"] > 0
    assert metrics["sampling/gap"] < 1e-3


class Bad(Calculator):
    def step(self, text: str) -> Any:
        raise KeyError("no book")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Bad.step, "problem 1, turn 0: environment's step raised KeyError: 'no book'"),
        (lambda self, text: time.sleep(60), "problem 1, turn 0: environment's step did not return within 0.2 seconds"),
        (lambda self, text: "", "problem 1, turn 0: environment's step must return a text that is not empty, got ''"),
        (lambda self, text: 7, "problem 1, turn 0: environment's step must return a text that is not empty, got 7"),
        (lambda self, text: "3<|im_end|>", "problem 1, turn 0: environment's step returned the end of a completion"),
    ],
)
def test_a_bad_environment_is_named_by_rollout_and_turn(played, step, message):
    made = iter([Calculator, Calculator, type("Broken", (Calculator,), {"step": step})])
    engine = PlayedEngine(
        lambda: next(made)(), played.engine._engine, played.tokenizer, end_ids(played.policy, played.tokenizer),
        timeout=0.2,
    )  # fmt: skip
    with pytest.raises(EnvironmentFailure, match=message):
        engine(played.prompts[:2], max_completion_length=60, names=["problem 0", "problem 1"])
