"""What each of two processes does where OpenRLHF's actor scores trees: on DeepSpeed's engine, its own, under Ray."""

import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch.distributed.device_mesh import init_device_mesh

from cfa_kernels import CounterfactualConfig
from cfa_kernels.integrations.openrlhf import CounterfactualMixin, with_tree_scoring
from cfa_kernels.integrations.workers import Workers
from tests.support.log_prob_hosts import PROMPTS, completions
from tests.support.openrlhf_host import check_credited, experiences, replace_gpu_libraries
from tests.support.sharded import deepspeed_on_a_cpu
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.workers import as_one_process, refuses_a_bad_id


def on_openrlhfs_actor(rank: int, stage: int, dtype: str, changes: dict[str, int]) -> None:
    """OpenRLHF's actor, strategy and arguments on a CPU; `float32` and torch's Adam are not its own."""
    copies = changes.get("copies", 1)
    on_a_cpu(dtype)
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

    with tempfile.TemporaryDirectory() as folder:
        saved = [folder]
        dist.broadcast_object_list(saved)
        (folder,) = saved
        tiny_model().save_pretrained(folder)  # which the first process does
        tiny_tokenizer().save_pretrained(folder)
        dist.barrier()
        strategy = strategy_of(
            "--ds.zero_stage", str(stage), "--ds.ring_attn_size", str(copies),
            "--ds.lora.rank", str(changes.get("lora", 0)), folder=folder,
        )  # fmt: skip
        strategy.args.ds.param_dtype = strategy.param_dtype = dtype
        worker = with_tree_scoring(PolicyModelActor).__ray_actor_class__(2, rank, "localhost", 0)
        worker.init_model_from_pretrained(strategy, folder, max_steps=2)
        dist.barrier()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # to which its forward sends ids
    tolerance, arithmetic = (5e-5, torch.float32) if dtype == "fp32" else (0.2, torch.bfloat16)
    before = _forward(worker)
    as_one_process(rank, lambda share: worker.score_trees([share] * copies), tolerance, arithmetic)
    assert torch.equal(_forward(worker), before)
    for _ in range(strategy.accumulated_gradient):
        logprobs = worker.actor(*_batch(), ring_attn_group=None)
        strategy.backward(logprobs.sum(), worker.actor, worker.actor_optim)
        strategy.optimizer_step(worker.actor_optim, worker.actor, worker.actor_scheduler)
    assert not torch.equal(_forward(worker), before)
    as_one_process(rank, lambda share: worker.score_trees([share] * copies), 10.0, arithmetic)  # trained; it still runs


def under_ray(stage: int) -> None:
    """OpenRLHF's group of two actors under Ray, its experience maker with credit, an error of one actor."""
    import ray

    os.environ |= {"RAY_AUTH_MODE": "disabled", "DS_ACCELERATOR": "cpu"}
    ray.init(
        num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"DS_ACCELERATOR": "cpu"}, "worker_process_setup_hook": _on_a_cpu},
    )  # fmt: skip
    on_a_cpu("fp32")
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ray.launcher import RayActorGroup
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        strategy = strategy_of("--ds.zero_stage", str(stage), folder=folder)
        strategy.args.ds.param_dtype = strategy.param_dtype = "fp32"
        group = RayActorGroup(1, 2, with_tree_scoring(PolicyModelActor))
        ray.get(group.async_init_model_from_pretrained(strategy, folder, 2, None))
    kind = type("Maker", (CounterfactualMixin, RemoteExperienceMaker), {})
    options = {"effect": "total"}
    own, maker = (
        maker(group, None, None, None, SimpleNamespace(value=0.0), strategy, tiny_tokenizer(), **credit)
        for maker, credit in (
            (RemoteExperienceMaker, {}),
            (kind, {"counterfactual": CounterfactualConfig(**options)}),
        )
    )
    assert isinstance(maker.access, Workers)
    own = own.compute_advantages_and_returns(experiences(Experience))
    check_credited(maker.compute_advantages_and_returns(experiences(Experience)), own, options)
    refuses_a_bad_id(maker.access)
    check_credited(maker.compute_advantages_and_returns(experiences(Experience)), own, options)
    ray.shutdown()


def _on_a_cpu() -> None:
    on_a_cpu("fp32")


def on_a_cpu(dtype: str) -> None:
    """Replace what OpenRLHF asks of a GPU in this process."""
    replace_gpu_libraries("ring_flash_attn")
    deepspeed_on_a_cpu(in_order=True)
    torch.cuda.current_device = lambda: 0  # its buffer of rollouts makes a name of it
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # type: ignore[assignment]
    from openrlhf.models import actor
    from openrlhf.utils import utils
    from openrlhf.utils.deepspeed import deepspeed as strategies

    strategies.init_device_mesh = lambda device, *args, **options: init_device_mesh("cpu", *args, **options)
    own = strategies.get_train_ds_config

    def config(**options: Any) -> dict[str, Any]:
        if options["optim_config"] is not None:
            options["optim_config"]["params"]["torch_adam"] = True  # DeepSpeed's own is compiled
        return own(**options)

    strategies.get_train_ds_config = config
    if Version(transformers.__version__) > Version("5.15.0"):  # which OpenRLHF asks for, and changes
        actor._patch_zero3_weight_mapping = lambda: None
    if dtype == "fp32":
        utils.convert_to_torch_dtype = lambda name: torch.float32


def strategy_of(*given: str, folder: str) -> Any:
    """OpenRLHF's strategy, of the arguments that its own command reads."""
    import openrlhf.utils
    import ray

    caught: list[Any] = []

    class Stop(Exception):
        pass

    def catch(args: Any) -> None:
        caught.append(args)
        raise Stop

    arguments = [
        "--actor.model_name_or_path", folder, "--reward.remote_url", "none", "--ckpt.path", str(Path(folder) / "none"),
        "--actor.num_gpus_per_node", "2", "--train.batch_size", "2", "--rollout.batch_size", "2",
        "--rollout.n_samples_per_prompt", "3", "--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", "0",
        "--vllm.num_engines", "1", "--vllm.sync_backend", "gloo",
        "--actor.adam.lr", "1e-2", "--actor.lr_warmup_ratio", "0",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openrlhf.utils, "get_strategy", catch)
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(sys, "argv", ["train", *arguments, *given])
        with pytest.raises(Stop):
            runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    (args,) = caught
    args.ds.attn_implementation, args.ds.packing_samples = "eager", False  # which a ring sets to flash attention's
    return openrlhf.utils.get_strategy(args)


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor([PROMPTS[0] + completions()[0]])
    return ids, torch.ones(1, len(completions()[0])), torch.ones_like(ids)


def _forward(worker: Any) -> torch.Tensor:
    return worker.forward(*_batch())
