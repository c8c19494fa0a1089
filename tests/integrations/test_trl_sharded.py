"""Training with credit where two processes share out the model's weights is training in one process."""

from typing import Any

import pytest
import torch

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from datasets import Dataset

from cfa_kernels import CounterfactualConfig
from tests.support import sharded, trl_sharded
from tests.support.trl_training import LORA, PROMPT, packs

PACKED: dict[str, Any] = {"packed_loss": True}
IDLE: dict[str, Any] = {"reward_funcs": trl_sharded.first_half}  # the second process has nothing to judge or to feed
OFF: dict[str, Any] = {"counterfactual": CounterfactualConfig(control="off")}
ONCE = {"max_steps": 1}
GRADIENT = CounterfactualConfig(estimator="gradient", outcome="mean_logprob", sigma=0)
# by name: arguments of the trainer, and of TRL's configuration
CASES: trl_sharded.Cases = {
    "credit, nothing to judge in one": (IDLE, ONCE),
    "packed, checkpointed by the wrapper": (PACKED, {"gradient_checkpointing": False}),
    "packed, nothing to feed in one, LoRA, KL, accumulated": (
        {**PACKED, **IDLE, "log_entropy": False, "peft_config": LORA},
        {"beta": 0.1, "gradient_accumulation_steps": 2, **ONCE},
    ),
}
GATHERED: trl_sharded.Cases = {"gradients through the model, which is gathered": ({"counterfactual": GRADIENT}, ONCE)}
EVALUATED = {**OFF, "eval_dataset": Dataset.from_dict({"prompt": [PROMPT]})}
HALVES = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, **ONCE}
IN_HALVES: trl_sharded.Cases = {"TRL's loss": (EVALUATED, HALVES), "packed": ({**EVALUATED, **PACKED}, HALVES)}


def skip_unless_deepspeed(how: str) -> None:
    """Skip what DeepSpeed shares out where it is not installed."""
    if how.startswith("ZeRO"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


@packs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("DDP", "DistributedDataParallel"),
        ("FSDP1", "FullyShardedDataParallel"),
        ("FSDP2", "FSDPPeftModel"),
        ("ZeRO-1", "DeepSpeedEngine"),
        ("ZeRO-2", "DeepSpeedEngine"),
        ("ZeRO-3", "DeepSpeedEngine"),
    ],
)
def test_sharded_processes_train_as_one(tmp_path, how, kind):
    skip_unless_deepspeed(how)
    alike = CASES | GATHERED if how == "ZeRO-3" else CASES
    sharded.run(2, trl_sharded.as_one_of_two, str(tmp_path), how, alike | IN_HALVES)
    together = torch.load(tmp_path / "two.pt", weights_only=False)
    for name, case in alike.items():
        one, two = trl_sharded.train("one", 1, *case), together[name]
        assert one["state"].keys() == two["state"].keys()
        for parameter, value in one["state"].items():
            close = {"rtol": 1e-3 if how == "DDP" else 1e-4, "atol": 1e-6}
            torch.testing.assert_close(two["state"][parameter], value, **close, msg=f"{name}: {parameter}")
        for a, b in zip(one["log"], two["log"], strict=True):
            for figure in ("loss", "grad_norm", "kl", "credit/drop_min", "credit/scored_fraction"):
                assert (figure in a) == (figure in b)
                if figure in a:
                    assert float(b[figure]) == pytest.approx(float(a[figure]), rel=1e-4, abs=1e-6), (name, figure)
        assert "credit/drop_min" in two["log"][0]
    assert two["kind"] == kind
    theirs, ours = (together[name]["log"] for name in IN_HALVES)
    for place, figure in ((0, "loss"), (0, "grad_norm"), (1, "eval_loss")):
        assert float(ours[place][figure]) == pytest.approx(float(theirs[place][figure]), rel=5e-3), figure


@packs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["FSDP2", "ZeRO-3"])
def test_what_one_process_raises_in_credit_ends_training_in_both(tmp_path, how):
    skip_unless_deepspeed(how)
    sharded.run(2, trl_sharded.failing_in_one, str(tmp_path), how)
