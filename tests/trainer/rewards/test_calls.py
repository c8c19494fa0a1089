"""Calls of reward functions: what they get, what they may return, and what is said about anything else."""

import asyncio
import math
import sys

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from trainer.metrics import reward_metrics
from trainer.rewards.calls import (
    RewardError,
    RewardLog,
    compute_rewards,
    group_advantages,
    load_reward,
    load_rewards,
    require_callable,
    rewards_by,
)
from trainer.rollouts.engine import Rollouts
from trainer.settings import ASSETS
from trainer.state import arguments, joined

SAMPLES = [f"sample {b} (row {10 * b})" for b in range(3)]
COLUMNS = {"prompts": ["q"] * 3, "completions": ["a", "b", "c"], "completion_ids": [[1], [2], [3]], "level": [1, 2, 0]}


def inverse(level, **_):
    return [1 / one for one in level]


def test_reward_functions_get_trl_arguments_and_are_added_up_by_weight_without_abstentions() -> None:
    calls = []

    def first(**arguments):
        calls.append({name: [*column] for name, column in arguments.items()})
        for column in arguments.values():  # its own copies
            column.clear()
        return [1.0, None, 0.5]

    functions = {"first": first, "second": lambda **_: [0.25, 2, None]}
    assert compute_rewards(functions, SAMPLES, COLUMNS)[0].tolist() == [1.25, 2.0, 0.5]
    total, by_function = compute_rewards(functions, SAMPLES, COLUMNS, weights=[2.0, -0.5])
    assert total.tolist() == [1.875, -1.0, 1.0]
    assert by_function == {"first": [1.0, None, 0.5], "second": [0.25, 2.0, None]}
    assert calls == [COLUMNS] * 2


async def inverse_later(level, **_):
    await asyncio.sleep(0)
    return [1 / one for one in level]


@pytest.mark.parametrize(("function", "after"), [(inverse, 1), (inverse_later, 2)])
def test_a_function_that_raises_is_named_with_its_own_line(function, after) -> None:
    line = function.__code__.co_firstlineno + after
    problem = rf"ZeroDivisionError: division by zero \(in test_calls.py, line {line}\)"
    with pytest.raises(RewardError, match=rf"^reward mine raised {problem}$"):
        rewards_by({"mine": function}, SAMPLES, COLUMNS)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions: [], "unexpected keyword argument 'prompts'"),
        (lambda prompts, completions, completion_ids: [], "unexpected keyword argument 'question'"),
        (lambda difficulty, **_: [], "missing a required argument: 'difficulty'"),
        pytest.param(
            lambda completions, /, **_: [],
            "missing a required positional-only argument|'completions'",
            marks=pytest.mark.skipif(sys.version_info[:2] == (3, 13), reason="bind of Python 3.13.0 lets it pass"),
        ),
    ],
)
def test_a_function_that_does_not_take_the_columns_is_named_with_them(function, said) -> None:
    with pytest.raises(ValueError, match=rf"^reward mine: .*({said}).* \['answer', 'question'\] by name"):
        require_callable({"mine": function}, {"question": "Q", "answer": "7"})


@pytest.mark.parametrize("name", ["exact_match", "math_verify"])
def test_no_reward_of_the_programs_is_for_what_stands_in_a_thought_that_the_prompt_opened(name) -> None:
    if name == "math_verify":
        pytest.importorskip("math_verify")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    prompt = tokenizer("9 * 2? Assistant: <think>\n")["input_ids"]
    texts = [
        "9 * 2 = 18, so \\boxed{18}? Wait",
        "Is it \\boxed{17}?</think>It is \\boxed{18}.",
        "Is it \\boxed{18}?</think>\\boxed{17}",
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for before, expected in ((prompt, [0, 1, 0]), (tokenizer("9 * 2?")["input_ids"], [1, 1, 0])):
        rollouts = Rollouts.of([before] * 3, ids, [torch.zeros(len(row)) for row in ids], [0], tokenizer)
        columns = arguments([{"question": "9 * 2?", "answer": "18"}] * 3, rollouts)
        assert columns["completions"] == texts
        assert rewards_by({name: load_reward(name)}, SAMPLES, columns) == {name: expected}
    assert joined([rollouts, rollouts]).contents == rollouts.contents * 2


@pytest.mark.parametrize(
    "values",
    [
        [True, False, None],
        [np.bool_(True), np.array(0.0), None],
        [torch.tensor(True), torch.tensor(0.0), None],
    ],
)
def test_any_real_numbers_are_rewards(values) -> None:
    functions = {"mine": lambda **_: values, "other": lambda **_: [0, 0, 1]}
    total, by_function = compute_rewards(functions, SAMPLES, COLUMNS)
    assert total.tolist() == [1.0, 0.0, 1.0]
    assert by_function["mine"] == [1.0, 0.0, None]
    metrics = reward_metrics(total, by_function, 3)
    assert metrics["rewards/mine/mean"] == 0.5
    assert metrics["rewards/mine/std"] == pytest.approx(0.5**0.5)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([1, "0.5", 0], ValueError, r"sample 1 .*: reward mine is '0.5', expected a real number or None"),
        ([torch.ones(1), 0, 0], ValueError, r"sample 0 .*: reward mine is tensor\(\[1.\]\), expected a real number"),
        ([0, torch.tensor(torch.nan), 0], FloatingPointError, r"sample 1 .*: reward mine is nan"),
        ([0, 0, 10**40], FloatingPointError, r"sample 2 .*: reward mine is 1000.*, beyond what float32 holds"),
        ([True, False], ValueError, "reward mine: returned 2 values, expected a list of 3 numbers"),
        ({0: 1, 1: 0, 2: 1}, ValueError, "reward mine: returned a dict, expected a list"),
        (torch.ones(3, 1), ValueError, "reward mine: returned a Tensor, expected a list"),
    ],
)
def test_anything_else_names_function_sample_and_value(values, kind, message) -> None:
    with pytest.raises(kind, match=message):
        compute_rewards({"mine": lambda **_: values}, SAMPLES, COLUMNS)


def test_reward_functions_are_reported_under_the_last_part_of_their_names_and_no_two_alike() -> None:
    assert list(load_rewards(["exact_match", "math:gcd"])) == ["exact_match", "gcd"]
    for names in (["math:gcd", "numpy:gcd"], ["exact_match", "trainer.rewards.numbers:exact_match"]):
        with pytest.raises(ValueError, match=f"two of {', '.join(names)} would be reported by one name"):
            load_rewards(names)


# TRL's form: coroutines, arguments of the run, and samples that all functions abstain on


def test_coroutines_of_all_functions_are_awaited_together_and_in_one_loop_for_the_whole_run() -> None:
    loops, meeting = [], []

    async def first(completions, **_):
        loops.append(asyncio.get_running_loop())
        meeting.append("first")
        while "second" not in meeting:  # would wait for ever if they ran one after the other
            await asyncio.sleep(0)
        return [1.0, None, 0.0]

    class Second:
        async def __call__(self, completions, **_):
            meeting.append("second")
            return [0.5] * len(completions)

    functions = {"first": first, "plain": lambda **_: asyncio.run(asyncio.sleep(0, [0, 0, 1])), "second": Second()}
    for _ in range(2):
        meeting.clear()
        total, by_function = compute_rewards(functions, SAMPLES, COLUMNS)
        assert total.tolist() == [1.5, 0.5, 1.5]
        assert by_function["first"] == [1.0, None, 0.0]
    assert loops[0] is loops[1]


def test_functions_get_the_state_of_the_run_and_log_if_they_take_the_arguments() -> None:
    def plain(prompts, completions, completion_ids, level):
        return [0.0] * 3

    def stateful(completions, trainer_state, log_metric, log_extra, **columns):
        log_metric("seen", trainer_state.global_step)
        log_extra("length", [len(text) for text in completions])
        log_extra("verdict", [torch.tensor(1.0), None, "bad"])
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    functions, log = {"plain": plain, "stateful": stateful}, RewardLog(2, 4)
    require_callable(functions, {"level": 1})
    assert compute_rewards(functions, SAMPLES, COLUMNS, log=log)[0].tolist() == [0.5] * 3
    assert log.metrics == [("seen", 2.0)]
    assert log.rows(3)[1:] == [{"length": 1, "verdict": None}, {"length": 1, "verdict": "bad"}]
    with pytest.raises(RewardError, match="log_extra: column 'length' has 3 values for 2 completions"):
        log.rows(2)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_samples_without_a_reward_are_trls(scale) -> None:
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 0, 0.5], [nan, 2, nan, nan], [nan] * 4, [1, 1, 1, nan], [1, 0, 0, 0]])
    groups = rewards.double()
    mean = groups.nanmean(1, keepdim=True)
    spread = {"none": 1.0, "batch": groups[~groups.isnan()].std() + 1e-4}.get(scale)
    if spread is None:  # of those that are known, by Bessel's correction
        known = (~groups.isnan()).sum(1, keepdim=True)
        spread = ((groups - mean).square().nansum(1, keepdim=True) / (known - 1)).sqrt() + 1e-4
    expected = ((groups - mean) / spread).nan_to_num(0.0)
    torch.testing.assert_close(group_advantages(rewards.flatten(), 4, scale).view(5, 4).double(), expected)
