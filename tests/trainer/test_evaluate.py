"""Evaluation: pass@k, draws that repeat and disturb nothing, and the reward that it counts by."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.support.embedded import settings
from trainer.config import TrainConfig
from trainer.evaluate import evaluate, pass_at, wilson_interval


class Recorder:
    """An engine that completes a prompt of n tokens by `n` greedily, and by its sample's number otherwise."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, prompts, *, keys=None, **options):
        self.calls.append((prompts, keys, options))
        texts = [str(len(prompt)) for prompt in prompts] if keys is None else [str(key[3]) for key in keys]
        rows = SimpleNamespace(lengths=[4] * len(texts))
        return SimpleNamespace(texts=texts, rows=rows, contents=(), ids=lambda: [[1] * 4 for _ in texts])


def even(*, prompts, completions, completion_ids, level, **_):
    """A reward of any kind: by TRL's contract."""
    assert len(prompts) == len(completions) == len(completion_ids) == len(level)
    return [None if text == "3" else (1.0, 0.5, 1.5, 0.5)[int(text) % 4] for text in completions]


ROWS = [{"question": f"{i}?", "level": i} for i in range(3)]
PROMPTS = [[1] * 4, [1] * 3, [1] * 5]


@pytest.mark.parametrize(
    ("right", "count", "ends"),
    [(81, 263, (0.2553, 0.3662)), (1, 29, (0.0061, 0.1718)), (0, 2, (0.0, 0.6576)), (2, 2, (0.3424, 1.0))],
)
def test_an_accuracy_has_wilsons_interval_as_newcombe_1998_tabulates_it(right, count, ends) -> None:
    assert wilson_interval(right, count) == pytest.approx(ends, abs=1e-4)


def test_a_problem_is_solved_where_the_runs_reward_gives_one_or_more() -> None:
    result = evaluate(Recorder(), ROWS, PROMPTS, TrainConfig(generation_batch_size=2, num_generations=2), match=even)
    assert (result.correct, result.mean_length) == ([True, False, False], 4.0)
    assert result.metrics == {
        "eval_accuracy": 1 / 3, "eval_accuracy_low": pytest.approx(0.0615, abs=1e-4),
        "eval_accuracy_high": pytest.approx(0.7923, abs=1e-4), "eval_completions/mean_length": 4.0,
    }  # fmt: skip


def test_samples_are_drawn_by_keys_of_their_own_and_counted_per_problem() -> None:
    engine, counted = Recorder(), []
    config = TrainConfig(eval_samples=3, seed=7, temperature=0.5, top_p=0.9, generation_batch_size=4, num_generations=4)
    result = evaluate(engine, ROWS, PROMPTS, config, match=even, advance=counted.append)
    keys = [key for _, own, _ in engine.calls for key in own or ()]
    assert sorted(keys) == [(7, 0, i, s, 2) for i in range(3) for s in range(3)]
    assert all(options["temperature"] == 0.5 for _, own, options in engine.calls if own)
    assert all("temperature" not in options for _, own, options in engine.calls if own is None)
    assert counted == [3, 4, 4, 1]
    assert result.pass_at == {1: pytest.approx(2 / 3), 2: 1.0, 3: 1.0}  # samples 0 and 2 of 3 are right


@pytest.mark.parametrize("right", range(6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(right) -> None:
    for k in range(1, 6):
        choices = [min(chosen) < right for chosen in itertools.combinations(range(5), k)]
        assert pass_at(k, right, 5) == pytest.approx(sum(choices) / len(choices), abs=1e-15)


def test_a_runs_samples_repeat_at_the_same_weights_and_disturb_no_draws(trainer) -> None:
    flags = ["--eval_samples=4", "--max_completion_length=24"]
    arguments = (trainer.engine, trainer.held_out[:3], trainer.held_out_prompts[:3])
    state = torch.get_rng_state()
    steps = list[int]()
    first, again = (
        evaluate(*arguments, settings(*flags, f"--generation_batch_size={size}"), advance=steps.append)
        for size in (8, 16)
    )
    assert first == again
    assert steps == [3, 8, 4, 3, 12]
    assert set(first.metrics) >= {"eval_pass@1", "eval_pass@4"}
    assert torch.equal(torch.get_rng_state(), state)
