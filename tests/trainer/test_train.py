"""The training program on its embedded model: the update, what goes wrong, what a run shows and leaves behind."""

import json
import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cfa_kernels import policy_loss
from cfa_kernels.rows import pad_rows
from tests.support.embedded import (
    EVERY_OTHER,
    advantages_of,
    metrics_of,
    padded_logprobs,
    run,
    samples_of,
    updated,
)
from tests.support.runs import timeless
from trainer.evaluate import Evaluation, paired_gain
from trainer.settings import EMBEDDED, model_path
from trainer.step import problem_batches, sample_keys, training_step

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("loss_type", "budget"), [("dapo", 1), ("grpo", 1), ("dr_grpo", 1), ("dapo", 10_000)])
def test_the_update_is_that_of_one_loss_over_the_whole_padded_batch(fresh, rollouts, loss_type, budget) -> None:
    trainer = fresh(f"--loss_type={loss_type}", f"--token_budget={budget}", "--max_grad_norm=1e9", "--credit=none")
    advantages = advantages_of(rollouts)
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.rand(length, generator=drawn) * 4 for length in rollouts.rows.lengths]
    logprobs, mask = padded_logprobs(trainer.policy, rollouts)
    loss, _ = policy_loss(
        logprobs, None, advantages, mask, weights=pad_rows(weights), loss_type=loss_type, max_completion_length=80
    )
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.policy.parameters()))])
    updated(trainer, rollouts, advantages, edits=weights)
    gradient = torch.cat([p.grad.flatten() for p in trainer.policy.parameters()])
    assert (gradient - expected).norm() <= 1e-4 * expected.norm()
    assert expected.norm() > 0


def test_signed_credit_changes_the_update_as_its_advantages_say(fresh, rollouts) -> None:
    gradients = []
    for control in ((), ("--control=off",), ("--control=inverted",)):
        trainer = fresh("--estimator=entropy_shaping", *control, "--max_grad_norm=1e9")
        updated(trainer, rollouts)
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.policy.parameters()]))
    forth, plain, back = gradients
    assert (forth - plain).norm() > 1e-3 * plain.norm()
    torch.testing.assert_close(forth - plain, plain - back, rtol=1e-3, atol=1e-4 * plain.abs().max().item())


def test_a_second_iteration_on_the_same_rollouts_is_off_policy(fresh, rollouts) -> None:
    trainer = fresh("--num_iterations=2", "--learning_rate=1e-3")
    _, metrics = updated(trainer, rollouts)
    assert metrics["ratio_mean"] != pytest.approx(1, abs=1e-3)
    assert metrics["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("peft", ["--no_use_peft", "--use_peft"])
def test_kl_is_taken_to_the_model_as_it_was_loaded(fresh, peft) -> None:
    trainer = fresh(
        "--beta=0.1", "--learning_rate=1e-3", peft, "--credit=none", EVERY_OTHER, "--temperature=3",
        "--max_completion_length=16", "--no_mask_truncated_completions",
    )  # fmt: skip
    kl = [training_step(trainer, step, [0]).metrics["kl"] for step in (1, 2)]
    assert abs(kl[0]) < 1e-6
    assert kl[1] > 1e-6


def test_a_batch_with_nothing_to_learn_from_leaves_the_model_alone(fresh, rollouts) -> None:
    trainer = fresh()
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    updated(trainer, rollouts, torch.zeros(32))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


def test_a_problem_that_comes_twice_in_a_step_has_two_groups_and_other_draws_stay(fresh) -> None:
    trainer = fresh("--max_completion_length=12", "--temperature=3")
    once, twice = (sample_keys(trainer.config, 1, problems) for problems in ([0, 1], [0, 1, 0, 0]))
    texts = trainer.sample(twice).texts
    groups = [texts[8 * i : 8 * i + 8] for i in range(4)]
    assert [*groups[0], *groups[1]] == trainer.sample(once).texts
    assert groups[0] != groups[2] != groups[3] != groups[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs") / "first", "--temperature=1.2", "--eval_problems=2")


def test_a_run_leaves_its_files_and_finite_metrics_under_trls_names(finished) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "metrics.jsonl", "completions.jsonl", "report.html", "config.yaml",
        "summary.json", "checkpoint", "checkpoints", ".lock",
    }  # fmt: skip
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        p.name for p in (finished / "checkpoint").iterdir()
    }
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["gain"] == pytest.approx(summary["accuracy_after"] - summary["accuracy_before"])
    before, *steps, after = metrics_of(finished)
    assert [entry["step"] for entry in (before, *steps, after)] == [0, 1, 2, 2]
    assert 0 <= before["eval_accuracy"] <= 1
    expected = {
        "loss", "reward", "reward_std", "rewards/exact_match/mean", "frac_reward_zero_std", "entropy", "grad_norm",
        "learning_rate", "num_tokens", "step_time", "completions/mean_length", "clip_ratio/region_mean",
        "sampling/gap", "credit/weight_mean", "credit/drop_mean", "time/generate", "time/credit", "time/update",
    }  # fmt: skip
    for entry in steps:
        assert expected <= set(entry)
        assert all(math.isfinite(value) for value in entry.values())
    assert steps[1]["num_tokens"] > steps[0]["num_tokens"]


def test_no_steps_evaluate_only(tmp_path) -> None:
    (entry,) = metrics_of(run(tmp_path / "run", "--max_steps=0", "--eval_problems=2"))
    assert entry["step"] == 0
    assert "eval_accuracy" in entry
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(finished, tmp_path) -> None:
    again = run(tmp_path / "again", "--temperature=1.2", "--eval_problems=2")
    assert timeless(again) == timeless(finished)
    assert samples_of(again) == samples_of(finished)
    assert (again / "checkpoint/model.safetensors").read_bytes() == (
        finished / "checkpoint/model.safetensors"
    ).read_bytes()
    other = run(tmp_path / "other", "--temperature=1.2", "--seed=1", "--max_steps=1", "--eval_problems=1")
    assert samples_of(other)[:4] != samples_of(finished)[:4]


def test_a_lora_run_leaves_an_adapter_that_loads(tmp_path) -> None:
    folder = run(tmp_path / "run", "--use_peft", "--lora_r=4", "--max_steps=1", "--learning_rate=1e-3")
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path(EMBEDDED)), folder / "adapter")
    moved = [p.abs().max().item() for name, p in model.named_parameters() if "lora_B" in name]
    assert moved
    assert all(value > 0 for value in moved)


def test_problems_come_in_shuffled_passes() -> None:
    batches = problem_batches(10, 4, seed=0)
    drawn = [i for _ in range(5) for i in next(batches)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert next(problem_batches(10, 4, seed=1)) != drawn[:4]


def test_the_gain_comes_with_its_paired_interval_which_has_a_width_where_nothing_changed() -> None:
    before = Evaluation([True, False, False, False], 1.0)
    after = Evaluation([True, True, True, False], 1.0)
    # 2 / 6 +- 1.96 sqrt((3 - 4 / 6) / 6 / 6).
    assert paired_gain(before, after) == pytest.approx((0.5, -0.1656, 0.8323), abs=1e-4)
    assert paired_gain(before, before) == pytest.approx((0.0, -0.3267, 0.3267), abs=1e-4)
