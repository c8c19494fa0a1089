"""`PackedGRPOTrainer` and TRL's own trainer on the completions of one real vLLM server; weights come in a file."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; .ci/extras served has an environment with it")
from accelerate import PartialState
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from cfa_kernels.integrations.trl import PackedGRPOTrainer
from cfa_kernels.integrations.vllm_kept import record_kept_ids

pytestmark = [pytest.mark.slow, pytest.mark.traced, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def train(served, tmp_path, monkeypatch):
    """Train two steps, the weights passed by the server's own `reload_weights` in the place of NCCL."""

    def update(client, metadata, named) -> None:
        save_file({name: weight.detach().clone() for name, weight in named}, tmp_path / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        client._post(f"{client.base_url}/collective_rpc", json=body)

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", update)
    rows = [{"prompt": f"Mia has ${i}. Mia buys 3 hats for $6 each. How many dollars are left?"} for i in range(30, 46)]

    def trained(kind: type, **options) -> list[dict[str, float]]:
        settings = {
            "max_steps": 2, "num_generations": 4, "max_completion_length": 32, "per_device_train_batch_size": 8,
            "learning_rate": 1e-3, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "seed": 3,
            "lr_scheduler_type": "constant", "gradient_checkpointing": False, "use_vllm": True, "vllm_mode": "server",
            "vllm_server_base_url": served.url, "generation_kwargs": {"seed": 11}, "temperature": 1.3,
        }  # fmt: skip
        trainer = kind(
            model=AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(served.folder),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            train_dataset=Dataset.from_list(rows), args=GRPOConfig(str(tmp_path / "run"), **settings | options),
        )  # fmt: skip
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    return trained


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_losses_are_trls(train, mode) -> None:
    theirs, ours = (train(kind, vllm_importance_sampling_mode=mode) for kind in (GRPOTrainer, PackedGRPOTrainer))
    for one, other in zip(theirs, ours, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert other["completions/mean_length"] == one["completions/mean_length"]


def test_the_loss_is_over_the_ids_that_the_server_kept(train) -> None:
    logged = train(PackedGRPOTrainer, top_p=0.9, vllm_importance_sampling_mode="token_truncate")
    for entry in logged:
        assert entry["sampling/sampling_logp_difference/max"] <= 3e-5
        assert entry["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"beta": 0.04}, "beta=0.04: the reference is over"), ({"tools": [len]}, "tools continue a completion")],
)
def test_the_log_says_why_the_loss_is_not_over_kept_ids(served, train, caplog, options, reason) -> None:
    tools, generation = options.pop("tools", None), SimpleNamespace(mode="server", vllm_client=VLLMClient(served.url))
    trainer = SimpleNamespace(
        vllm_generation=generation, accelerator=PartialState(), beta=options.get("beta", 0), tools=tools
    )
    record_kept_ids(trainer)
    assert f"the loss is not over the ids that vLLM kept: {reason}" in caplog.text
    assert not hasattr(generation, "generate")


def test_a_penalty_with_a_cut_distribution_is_refused_by_name(train) -> None:
    options = {"top_p": 0.9, "generation_kwargs": {"presence_penalty": 0.5}}
    with pytest.raises(NotImplementedError, match=r"presence_penalty=0.5 with top_p=0.9: a penalty changes the scores"):
        train(PackedGRPOTrainer, **options)
