"""Settings of rewards: weights of several functions, and which rewards go with which rows."""

import pytest

from tests.support.embedded import EVEN, metrics_of, run, settings
from trainer.config import TrainConfig
from trainer.data import configured_prompt
from trainer.rewards.built_in import BUILT_IN, BuiltIn


class Text:
    """A tokenizer whose ids are the text."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": text}


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
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: 2 weights for 1 reward_funcs"),
        ({"reward_weights": [float("nan")]}, r"reward_weights must be finite numbers, got \[nan\]"),
        ({"reward_timeout": 0.0}, r"reward_timeout must be in \[1e-38, 1e38\], got 0.0"),
        ({"eval_samples": -1}, "eval_samples must be an integer, at least 0, got -1"),
        ({"reward_funcs": ["code"]}, "dataset: 'generated' has no tests"),
        (
            {"reward_funcs": ["exact_match", "code"]},
            "reward_funcs: code reads rows of mbpp, and eval_reward exact_match numbers",
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
        (["--model=other", "--reward_funcs", "code", "--dataset=owner/mbpp"], "code", "mbpp", "```python"),
        (["--reward_funcs", "math:gcd", "--eval_reward", "math:gcd"], "math:gcd", "text", ""),
        (["--reward_funcs", "math:gcd"], "exact_match", "numbers", ""),
    ],
)  # fmt: skip
def test_rewards_say_what_evaluation_counts_and_what_rows_must_have(argv, grader, kind, instruction) -> None:
    config = settings(*argv)
    assert (config.grader, config.kind) == (grader, kind)
    assert instruction in configured_prompt("How many?", Text(), config)
    assert settings(*argv, "--instruction=Go.").instruction == "Go."


@pytest.mark.parametrize("order", [["short", "math_verify"], ["math_verify", "short"], ["short"]])
def test_a_reward_of_the_program_that_only_shapes_is_not_what_evaluation_counts_by(order, monkeypatch) -> None:
    monkeypatch.setitem(BUILT_IN, "short", BuiltIn("math:gcd", ("numbers", "text"), (), grades=False))
    config = TrainConfig(reward_funcs=order)
    assert config.grader == ("math_verify" if "math_verify" in order else "exact_match")
    assert TrainConfig(reward_funcs=order, eval_reward="exact_match").grader == "exact_match"
