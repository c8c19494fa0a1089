"""Arithmetic of a run: what `--dtype` chooses, and mixed precision with float32 weights and bfloat16 products."""

import pytest
import torch
from torch import nn

from cfa_kernels import policy_loss
from tests.support.budget import assert_within_budget
from tests.support.embedded import EVERY_OTHER, padded_logprobs, settings, updated
from trainer import precision
from trainer.precision import Precision, frozen_copy
from trainer.rollouts.in_process import TransformersEngine
from trainer.run import set_up
from trainer.step import training_step

F32, BF16 = torch.float32, torch.bfloat16
KEYS = [(0, 1, 0, g) for g in range(8)]


@pytest.fixture
def mixed(tiny_folder):
    """Sets a tiny policy up in mixed precision; one group is a micro-batch, truncated completions count."""
    usual = [
        f"--model={tiny_folder / 'model'}", "--dtype=mixed", "--no_use_peft", "--token_budget=1",
        "--max_completion_length=12", "--no_mask_truncated_completions", "--instruction=", "--max_grad_norm=1e9",
        EVERY_OTHER,
    ]  # fmt: skip
    return lambda *argv: set_up(settings(*usual, *argv))


@pytest.mark.parametrize(
    ("dtype", "device", "adapters", "weights", "products"),
    [
        ("auto", "cpu", False, F32, F32), ("auto", "cpu", True, F32, F32), ("auto", "cuda:1", True, BF16, BF16),
        ("auto", "cuda", False, F32, BF16), ("mixed", "cuda", True, F32, BF16), ("float32", "cuda", False, F32, F32),
        ("bfloat16", "cuda", True, BF16, BF16), ("mixed", "cpu", False, F32, BF16),
    ],
)  # fmt: skip
def test_dtype_chooses_the_type_of_weights_and_of_products(
    dtype, device, adapters, weights, products, monkeypatch
) -> None:
    monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda: False)
    actual = Precision.of(dtype, device, adapters=adapters)
    assert actual == Precision(torch.device(device), weights, products)
    assert actual.is_mixed == (weights != products)


@pytest.mark.parametrize(("adapters", "weights"), [(True, BF16), (False, F32)])
def test_auto_is_bfloat16_for_adapters_on_a_cpu_that_multiplies_it(adapters, weights, monkeypatch) -> None:
    monkeypatch.setattr(precision, "cpu_multiplies_bfloat16", lambda: True)
    assert Precision.of("auto", "cpu", adapters=adapters) == Precision(torch.device("cpu"), weights, weights)


def test_the_gradient_in_mixed_precision_is_float32_and_off_by_the_rounding_of_bfloat16(mixed) -> None:
    """Bounded by what autocast makes of the model's own forward over the padded batch, in the same precision."""
    trainer = mixed("--temperature=1", "--top_p=1", "--credit=none")
    rollouts = trainer.sample(KEYS)
    advantages = torch.tensor([1.0, -1.0] * 4)

    def padded(model: nn.Module, *, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", BF16, enabled=rounded):
            logprobs, mask = padded_logprobs(model, rollouts, torch.float64)
        loss, _ = policy_loss(logprobs, None, advantages, mask, loss_type="dapo", max_completion_length=12)
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        return loss.detach(), torch.cat([g.flatten() for g in gradients])

    budget, oracle = padded(trainer.policy, rounded=True), padded(trainer.policy, rounded=False)
    metrics = updated(trainer, rollouts, advantages)[1]
    actual = torch.cat([p.grad.flatten() for p in trainer.policy.parameters()])
    assert actual.dtype == F32
    error, allowed = ((x.double() - oracle[1].double()).norm() for x in (actual, budget[1]))
    assert 0 < error <= 2 * allowed < 0.1 * oracle[1].norm()
    assert_within_budget(actual, budget[1], oracle[1].double())
    assert metrics["loss"] == pytest.approx(float(oracle[0]), abs=2 * float((budget[0] - oracle[0]).abs()) + 1e-3)


@pytest.mark.parametrize("peft", [False, True])
def test_a_bfloat16_copy_samples_and_follows_the_weights(mixed, peft) -> None:
    trainer = mixed("--use_peft" if peft else "--no_use_peft")
    assert all(p.dtype == F32 for p in trainer.policy.parameters())
    places, before = [p.data_ptr() for p in trainer.engine._model.parameters()], trainer.sample(KEYS)
    gap = training_step(trainer, 1, [0]).metrics["sampling/gap"]
    assert 1e-4 < gap < 0.15 / trainer.config.temperature
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.mul_(1.5)
    actual = trainer.sample(KEYS)
    expected = TransformersEngine(frozen_copy(trainer.policy, BF16), trainer.tokenizer)
    options = {"max_completion_length": 12, "keys": KEYS, "temperature": 0.6, "top_p": 0.95}
    assert actual.ids() == expected([trainer.prompts[0]] * 8, **options).ids() != before.ids()
    assert places == [p.data_ptr() for p in trainer.engine._model.parameters()]
