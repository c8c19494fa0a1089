"""Training with credit where two processes share out the model's weights is training in one process."""

from typing import Any

import pytest
import torch

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from cfa_kernels import CounterfactualConfig
from tests.support import sharded, trl_sharded
from tests.support.trl_training import LORA, fuses

PACKED: dict[str, Any] = {"packed_loss": True}
IDLE: dict[str, Any] = {"reward_funcs": trl_sharded.first_half}  # the second process has nothing to judge or to feed
OFF: dict[str, Any] = {"counterfactual": CounterfactualConfig(control="off")}
ONCE = {"max_steps": 1}
# by name: arguments of the trainer, and of TRL's configuration
CASES: trl_sharded.Cases = {
    "credit, nothing to judge in one": (IDLE, ONCE),
    "packed, checkpointed by the wrapper": (PACKED, {"gradient_checkpointing": False}),
    "packed, nothing to feed in one, LoRA, KL, accumulated": (
        {**PACKED, **IDLE, "log_entropy": False, "peft_config": LORA},
        {"beta": 0.1, "gradient_accumulation_steps": 2, **ONCE},
    ),
}
IN_HALVES: trl_sharded.Cases = {
    "TRL's loss": (OFF, {"bf16": True, **ONCE}), "packed": ({**OFF, **PACKED}, {"bf16": True, **ONCE}),
}  # fmt: skip


@fuses
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("how", "kind"), [("FSDP1", "FullyShardedDataParallel"), ("FSDP2", "FSDPPeftModel")])
def test_sharded_processes_train_as_one(tmp_path, how, kind):
    sharded.run(2, trl_sharded.as_one_of_two, str(tmp_path), how, CASES | IN_HALVES)
    together = torch.load(tmp_path / "two.pt", weights_only=False)
    for name, case in CASES.items():
        one, two = trl_sharded.train("one", 1, *case), together[name]
        assert one["state"].keys() == two["state"].keys()
        for parameter, value in one["state"].items():
            torch.testing.assert_close(two["state"][parameter], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")
        for a, b in zip(one["log"], two["log"], strict=True):
            for figure in ("loss", "grad_norm", "kl", "credit/drop_min", "credit/scored_fraction"):
                assert (figure in a) == (figure in b)
                if figure in a:
                    assert float(b[figure]) == pytest.approx(float(a[figure]), rel=1e-4, abs=1e-6), (name, figure)
        assert "credit/drop_min" in two["log"][0]
    assert two["kind"] == kind
    theirs, ours = (together[name]["log"][0] for name in IN_HALVES)
    for figure in ("loss", "grad_norm"):
        assert float(ours[figure]) == pytest.approx(float(theirs[figure]), rel=5e-3), figure
