"""Settings of rewards: weights of several functions, and which rewards go with which rows."""

import pytest

from tests.support.embedded import EVEN, metrics_of, run, settings
from trainer.config import TrainConfig
from trainer.rewards import compute_rewards

GIVEN = {"prompts": ["q"] * 3, "completions": ["a", "b", "c"], "completion_ids": [[1], [2], [3]]}


def test_weights_apply_to_the_sum_and_not_to_what_is_reported() -> None:
    functions = {"first": lambda **_: [1.0, None, 0.5], "second": lambda **_: [0.25, 2, None]}
    total, found = compute_rewards(functions, GIVEN, weights=[2.0, -0.5])
    assert total.tolist() == [1.875, -1.0, 1.0]
    assert found == {"first": [1.0, None, 0.5], "second": [0.25, 2.0, None]}


@pytest.mark.slow
def test_a_run_adds_its_rewards_up_by_their_weights(tmp_path) -> None:
    both = f"{EVEN.partition('=')[2]}"
    folder = run(
        tmp_path / "run", "--max_steps=1", "--reward_funcs", "exact_match", both, "--reward_weights", "2", "-1"
    )
    step = metrics_of(folder)[1]
    expected = 2 * step["rewards/exact_match/mean"] - step["rewards/even/mean"]
    assert step["reward"] == pytest.approx(expected, abs=1e-6)
    assert step["rewards/even/mean"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_weights": [1.0, 2.0]}, r"reward_weights: 2 weights for 1 reward_funcs \(exact_match\)"),
        ({"reward_weights": [float("nan")]}, "reward_weights must be finite, got nan for exact_match"),
        ({"reward_weights": [float("inf")]}, "reward_weights must be finite, got inf"),
        ({"reward_timeout": 0.0}, "reward_timeout must be positive and finite, got 0.0"),
        ({"eval_samples": -1}, "eval_samples must be at least 0, got -1"),
        ({"reward_funcs": ["code"]}, "dataset: 'generated' has no tests"),
        (
            {"reward_funcs": ["exact_match", "code"]},
            "reward_funcs: code judges rows of dataset_kind mbpp, and these are n",
        ),
        (
            {"reward_funcs": ["code"], "dataset": "a.jsonl", "dataset_kind": "text"},
            "dataset_kind mbpp, and these are text",
        ),
        (
            {"reward_funcs": ["math:gcd"], "dataset": "a.jsonl", "dataset_kind": "mbpp"},
            "eval_reward: exact_match judges rows of dataset_kind numbers, and these are mbpp",
        ),
    ],
)
def test_a_setting_of_rewards_that_cannot_be_is_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("argv", "grader", "kind", "instruction"),
    [
        ([], "exact_match", "numbers", ""),  # the embedded model's own
        (["--reward_funcs", "math:gcd", "exact_match"], "exact_match", "numbers", ""),
        (["--model=other", "--reward_funcs", "math_verify"], "math_verify", "text", r"\boxed{}"),
        (["--model=x", "--reward_funcs=math_verify", "--dataset_kind=numbers"], "math_verify", "numbers", "####"),
        (["--model=other", "--reward_funcs", "code", "--dataset=a.jsonl"], "code", "mbpp", "```python"),
        (["--reward_funcs", "math:gcd", "--eval_reward", "math:gcd"], "math:gcd", "text", ""),
        (["--reward_funcs", "math:gcd"], "exact_match", "numbers", ""),
    ],
)  # fmt: skip
def test_rewards_say_what_evaluation_counts_and_what_rows_must_have(argv, grader, kind, instruction) -> None:
    config = settings(*argv)
    assert (config.grader, config.kind) == (grader, kind)
    assert instruction in config.instruction
    assert settings(*argv, "--instruction=Go.").instruction == "Go."
