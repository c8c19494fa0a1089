"""Liger is applied once, as the policy is loaded: on a GPU, and without its loss."""

import pytest
import torch

from trainer import policy
from trainer.config import TrainConfig
from trainer.precision import Precision


@pytest.mark.parametrize(("device", "applied"), [("cuda", 1), ("cpu", 0)])
def test_liger_is_applied_to_the_policy_on_a_gpu(monkeypatch, device, applied) -> None:
    calls = []
    monkeypatch.setattr(policy, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(policy, "apply_liger_kernel", lambda model, options: calls.append(options))
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args, **options: self)
    precision = Precision(torch.device(device), torch.float32, torch.float32)
    monkeypatch.setattr(TrainConfig, "precision", precision)
    config = TrainConfig()
    policy.load_policy(config, policy.load_tokenizer(config)[0])
    assert calls == [{"cross_entropy": False, "fused_linear_cross_entropy": False}] * applied
