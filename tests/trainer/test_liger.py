"""Liger's fused layers run while the trainer samples, evaluates and updates on a GPU, if its setting says so."""

from types import MethodType

import pytest

from cfa_kernels.hf import liger as fused_modules
from cfa_kernels.hf.model import causal_lm
from trainer import run, step


@pytest.fixture
def norms(monkeypatch):
    """Every model counts as lying on a GPU; the list grows with each norm that runs in place of the model's own."""
    ran = []

    def forward(self, x):
        ran.append(self)
        return type(self).forward(self, x)

    forward.__module__ = "liger_kernel.transformers.rms_norm"

    def apply(model):
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.__dict__["forward"] = MethodType(forward, module)

    monkeypatch.setattr(fused_modules, "_on_gpu", lambda model: True)
    monkeypatch.setattr(fused_modules, "_apply_liger", apply)
    return ran


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("reference", ["--use_peft", "--no_use_peft"])
def test_sampling_evaluation_reference_and_update_run_them_unless_the_setting_forbids(
    norms, fresh, monkeypatch, tmp_path, use, reference
):
    argv = ["--max_steps=1", "--train_problems=2", "--eval_problems=1", "--generation_batch_size=8"]
    argv += [
        "--use_liger_kernel" if use else "--no_use_liger_kernel",
        reference,
        "--beta=0.1",
        f"--output_dir={tmp_path / 'run'}",
    ]
    shares = {}

    def watched(module, name):
        does = getattr(module, name)

        def watch(*args, **kwargs):
            before = len(norms)
            result = does(*args, **kwargs)
            shares[name] = len(norms) > before
            return result

        monkeypatch.setattr(module, name, watch)

    trainer = fresh(*argv)
    for module, name in ((step, "draw"), (run, "evaluate"), (step, "update")):
        watched(module, name)
    run.train(trainer)
    assert shares == dict.fromkeys(("draw", "evaluate", "update"), use)
    policy = causal_lm(trainer.policy)
    assert bool(norms) == use
    assert any(not any(norm is module for module in policy.modules()) for norm in norms) == (
        use and reference == "--no_use_peft"  # the reference is a copy of its own
    )
    assert not any("forward" in module.__dict__ for module in policy.modules())
