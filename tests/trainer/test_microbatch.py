"""Micro-batches: which rows are fed, and that their log-probs are those they were sampled with."""

from dataclasses import replace

import pytest
import torch

from cfa_kernels.proof import prove_head
from tests.trainer.embedded import advantages_of, sample, settings
from trainer.microbatch import checked_sampling_gap, micro_batches
from trainer.model import completion_logprobs
from trainer.train import update


def test_rows_without_advantage_are_not_fed_unless_the_kl_term_needs_them(rollouts) -> None:
    def fed(config) -> list[int]:
        parts = micro_batches(
            config, rollouts, rollouts.completion_mask, advantages_of(rollouts), torch.ones_like(rollouts.logprobs)
        )
        return sorted(row for part in parts for row in part.rows.tolist())

    assert fed(settings()) == [*range(8), *range(24, 32)]
    assert fed(settings("--beta=0.1")) == list(range(32))


def update_on_a_group(trainer) -> dict[str, float]:
    """Sample eight completions of a problem and take the optimizer step on them."""
    config = trainer.config
    rollouts = sample(trainer, [0], temperature=config.temperature, top_p=config.top_p, max_completion_length=40)
    return update(
        trainer, rollouts, rollouts.completion_mask, advantages_of(rollouts), torch.ones_like(rollouts.logprobs)
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_a_policy_that_trains_as_it_samples_is_not_stopped(fresh, dtype, rounding, temperature) -> None:
    trainer = fresh(f"--dtype={dtype}", f"--temperature={temperature}", "--top_p=0.9")
    assert all(update_on_a_group(trainer)["sampling/gap"] < rounding / temperature for _ in range(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_that_are_not_those_sampled_with_stop_the_run_before_a_step(fresh, dtype, monkeypatch) -> None:
    # Logits at half their size: about what a scale that the model's configuration names otherwise does.
    monkeypatch.setattr("trainer.model.prove_head", lambda model: replace(prove_head(model), logit_scale=0.5))
    trainer = fresh(f"--dtype={dtype}")
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    with pytest.raises(FloatingPointError, match=r"^samples \[\d.*\]: their log-probs in the update are not those"):
        update_on_a_group(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))
    assert update_on_a_group(fresh(f"--dtype={dtype}", "--max_sampling_gap=1000"))["sampling/gap"] > 0.3


def test_one_sample_of_wrong_log_probs_is_the_one_named(trainer, rollouts, monkeypatch) -> None:
    config = settings("--per_device_train_batch_size=32", "--gradient_accumulation_steps=1")
    mask = rollouts.completion_mask
    (part,) = micro_batches(config, rollouts, mask, torch.ones(32), torch.ones_like(rollouts.logprobs))

    def wrong(*args, **kwargs):
        logprobs, entropies = completion_logprobs(*args, **kwargs)
        return logprobs - 2.0 * (part.rows == 5)[:, None], entropies

    monkeypatch.setattr("trainer.microbatch.completion_logprobs", wrong)
    part.old_logprobs = part.logprobs(trainer.policy, 1.0)[0].detach()
    with pytest.raises(FloatingPointError, match=r"^samples \[5\]: .* in sample 5, and max_sampling_gap is 0.02"):
        checked_sampling_gap([part], trainer.policy, config)


def test_dropout_in_the_update_is_no_fault_of_the_log_probs(fresh) -> None:
    trainer = fresh()
    for layer in trainer.policy.model.layers:
        layer.self_attn.attention_dropout = 0.5
    metrics = update_on_a_group(trainer)
    assert metrics["sampling/sampling_logp_difference/mean"] > 0.02
    assert metrics["sampling/gap"] < 1e-4
    assert trainer.policy.model.layers[0].self_attn.attention_dropout == 0.5
