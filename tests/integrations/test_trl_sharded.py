"""Training with credit where two processes share out the model's weights is training in one process."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from packaging.version import Version
from safetensors.torch import save_file

from cfa_kernels import CounterfactualConfig, Importances
from tests.support import trl_training
from tests.support.sharded import deepspeed_on_a_cpu, run, skip_unless_deepspeed, values
from tests.support.tiny import tiny_model
from tests.support.trl_training import LORA, PROMPT, packs, same_rollouts

pytestmark = [packs, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def accept_fsdp_on_a_cpu() -> None:
    """Let accelerate's state keep the plugin of FSDP, which it drops on a CPU; all that shards is accelerate's own."""
    made = AcceleratorState.__init__

    def keep(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            for state in (self.__dict__, PartialState._shared_state):  # of which later ones are made
                state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = keep


def first_half(completions: list[Any], **kwargs: object) -> list[float]:
    """No advantage for the second half of eight: the mean is theirs."""
    first = int(os.environ.get("RANK", 0)) * len(completions)
    return [(1.0, 0.0, 0.5)[i % 2 if i < 4 else 2] for i in range(first, first + len(completions))]


def build(how: str, processes: int, folder: str, given: dict[str, Any], options: dict[str, Any]) -> Any:
    """Make the trainer of one of `processes`; `how` is DDP, or FSDP or ZeRO with its version or stage."""
    shared: dict[str, Any] = {}
    if how == "FSDP2":  # weights are equal from the start; accelerate broadcasts them through a device only
        wraps = not options.get("gradient_checkpointing", True)
        config = {"version": 2, "sync_module_states": False, "activation_checkpointing": wraps}
        # Older ones wrap layers only when told so; they warn where it is the default.
        by_layer = "full_shard auto_wrap" if Version(transformers.__version__) < Version("5.15") else True
        shared = {"fsdp": by_layer, "fsdp_config": config}
    elif how == "ZeRO-3":
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        config = dict.fromkeys(names, "auto") | {"zero_optimization": zero, "bf16": {"enabled": "auto"}}
        shared = {"deepspeed": config}
    rows = 8 // processes // options.get("gradient_accumulation_steps", 1)
    settings = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "max_steps": 2, "optim": "sgd"}
    made = {"train_dataset": Dataset.from_dict({"prompt": [PROMPT] * 8}), "rollout_func": same_rollouts}
    if options.get("beta") and "peft_config" not in given:  # a model of its own, which TRL loads and shares out
        model, made["model"] = tiny_model(), folder  # transformers saves in the first process only
        model.config.architectures = [type(model).__name__]
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return trl_training.build(folder, trainer=made | given, **settings | shared | options)


def train(how: str, processes: int, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train in one of `processes`; return whole weights by name, the log, and what the model became."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(how, processes, folder, given, options)
        trainer.train()
    kind = type(trainer.model_wrapped).__name__
    return {"state": values(trainer.model_wrapped), "log": trainer.state.log_history, "kind": kind}


Cases = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def as_one_of_two(rank: int, folder: str, how: str, cases: Cases) -> None:
    """Train by each of `cases`, arguments of the trainer and of TRL's configuration; save what came of it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    if how.startswith("ZeRO"):
        deepspeed_on_a_cpu(in_order=True)
    elif how.startswith("FSDP"):
        accept_fsdp_on_a_cpu()
    found = {}
    for name, case in cases.items():
        try:
            found[name] = train(how, 2, *case)
        except Exception as error:
            raise AssertionError(f"{how}, {name}") from error
    if rank == 0:
        torch.save(found, Path(folder) / "two.pt")


def beside_others(model: Any, batch: Any) -> Importances:
    longest = max(batch.scored.lengths)
    return Importances([torch.arange(len(units)) * len(batch) / longest for units in batch.units])


PACKED: dict[str, Any] = {"packed_loss": True}
IDLE: dict[str, Any] = {"reward_funcs": first_half}  # the second process has nothing to judge or to feed
ONCE = {"max_steps": 1}
# by name: arguments of the trainer, and of TRL's configuration
CASES: Cases = {
    "credit, nothing to judge in one": (IDLE, ONCE),
    "packed, checkpointed by the wrapper, high entropies of all": (
        PACKED,
        {"gradient_checkpointing": False, "top_entropy_quantile": 0.33},
    ),
    "packed, a reference model": (PACKED, {"beta": 0.1, "model_init_kwargs": {"dtype": "float32"}}),
    "packed, nothing to feed in one, LoRA, KL, accumulated": (
        {**PACKED, **IDLE, "log_entropy": False, "peft_config": LORA},
        {"beta": 0.1, "gradient_accumulation_steps": 2, **ONCE},
    ),
}
COMPARED: Cases = {  # whole groups are split between the processes
    "top of all": ({"credit": CounterfactualConfig(estimator="entropy"), **IDLE}, ONCE),
    "a function, given all": (
        {"credit": CounterfactualConfig(estimator=beside_others, weights="identity", units="tokens")},
        {**ONCE, "num_generations": 4},
    ),
}


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return train("one", 1, *(CASES | COMPARED)[name])


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("DDP", "DistributedDataParallel"), ("FSDP2", "FSDPPeftModel"), ("ZeRO-3", "DeepSpeedEngine"),
    ],
)  # fmt: skip
def test_sharded_processes_train_as_one(tmp_path, how, kind):
    skip_unless_deepspeed(how)
    alike = (COMPARED if how == "FSDP2" else {}) | CASES
    run(2, as_one_of_two, str(tmp_path), how, alike)
    together = torch.load(tmp_path / "two.pt", weights_only=False)
    for name in alike:
        one, two = alone(name), together[name]
        torch.testing.assert_close(two["state"], one["state"], rtol=1e-3 if how == "DDP" else 1e-4, atol=1e-6)
        for a, b in zip(one["log"], two["log"], strict=True):
            for figure in ("loss", "grad_norm", "kl", "credit/drop_max", "credit/scored_fraction"):
                assert (figure in a) == (figure in b)
                if figure in a:
                    assert float(b[figure]) == pytest.approx(float(a[figure]), rel=1e-4, abs=1e-6), (name, figure)
        assert "credit/drop_max" in two["log"][0]
    assert two["kind"] == kind
