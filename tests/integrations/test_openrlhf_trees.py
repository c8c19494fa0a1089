"""Packed trees on OpenRLHF's actors: stand-ins of its classes, then its own with DeepSpeed and Ray, where installed."""

import logging
import os
import re
import runpy
import subprocess
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

import cfa_kernels.integrations.openrlhf as integration
from cfa_kernels import CounterfactualConfig
from cfa_kernels.integrations.openrlhf import CounterfactualMixin, with_tree_scoring
from cfa_kernels.integrations.workers import Workers
from cfa_kernels.scoring.access import LogprobService
from tests.support.log_prob_hosts import PROMPTS, completions
from tests.support.openrlhf_host import (
    Host,
    TreeActors,
    check_credited,
    experiences,
    replace_gpu_libraries,
    skip_without,
)
from tests.support.plug_ins import RESAMPLING, TOTAL_EFFECTS
from tests.support.sharded import deepspeed_on_a_cpu, run
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.workers import as_one_process, refuses_a_bad_id

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Experience maker with credit in a stand-in of OpenRLHF, which need not be there."""
    monkeypatch.setattr(integration, "require", lambda *args: None)

    def make(group: Any, credit: CounterfactualConfig | None = None, **changes: Any) -> Any:
        return type("Maker", (CounterfactualMixin, Host), {})(group, counterfactual=credit, **changes)

    return make


@pytest.mark.parametrize(
    ("options", "actors", "copies"),
    [
        ({}, 2, 2), (TOTAL_EFFECTS, 2, 1), ({"outcome": "mean"}, 1, 1), ({**RESAMPLING, "samples": 2}, 3, 1),
        ({"estimator": "prefix_gain"}, 1, 2),
    ],
    ids=str,
)  # fmt: skip
def test_actors_score_trees_as_one_process_does(maker, options, actors, copies):
    group = TreeActors(actors, copies)
    maker = maker(group, CounterfactualConfig(**options), actors=actors, copies=copies)
    made = maker.compute_advantages_and_returns(experiences(SimpleNamespace))
    check_credited(made, Host(None).compute_advantages_and_returns(experiences(SimpleNamespace)), options)
    check_of_the_model, scored = group.sent[0], group.sent[-1]
    assert check_of_the_model == [0] * actors * copies
    expected = [5] if actors * copies == 1 else [2, 3]  # two groups, of which one has a row without an answer
    assert sorted(scored) == [0] * (actors * copies - len(expected)) + expected
    assert all(made[0].info["credit/tokens_fed"] > 0)


def test_where_others_share_the_gpus_the_cache_is_emptied_and_the_mode_is_openrlhfs_also_after_an_error(monkeypatch):
    group = TreeActors(1, colocate_all=True)
    (worker,) = group.workers
    monkeypatch.setattr(integration, "judge_share", lambda model, share: worker.actor.training)
    assert worker.score_trees([None]) is False
    assert (worker.actor.training, group.emptied) == (True, 1)
    monkeypatch.setattr(integration, "judge_share", lambda model, share: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.score_trees([None])
    assert (worker.actor.training, group.emptied) == (True, 2)


class OldActors(TreeActors):
    """Actors of a launcher that knows nothing of trees."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ray_actor_type = SimpleNamespace(__ray_actor_class__=object)


CANNOT = [
    (TreeActors, {"tensor": 2}, "--ds.tensor_parallel_size 2"),
    (TreeActors, {"deepcompile": True}, "--ds.deepcompile"),
    (OldActors, {}, "an actor class without with_tree_scoring"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), CANNOT)
def test_where_trees_cannot_be_scored_the_log_says_why_and_requests_are_sent(maker, caplog, kind, changes, reason):
    group = kind(1)
    asked = maker(group, **changes)
    assert isinstance(asked.access, LogprobService)
    assert asked.access is asked.access
    (said,) = [record.getMessage() for record in caplog.records if record.name == Workers.__module__]
    assert said == f"credit: scored by log-prob requests, which share no prefixes, because of {reason}"
    message = rf"estimator='total_effects': it needs the model.*requested because of {re.escape(reason)}"
    with pytest.raises(NotImplementedError, match=message):
        maker(group, CounterfactualConfig(**TOTAL_EFFECTS), **changes)
    assert group.sent == []


def test_a_model_that_has_no_tree_gets_requests_or_is_refused_before_the_first_rollout(maker, caplog):
    model = tiny_model().eval()
    model.lm_head.register_forward_hook(lambda module, args, logits: 2 * logits)
    group = TreeActors(1, model=model)
    asked = maker(group)
    assert isinstance(asked.access, LogprobService)
    assert re.search(r"because of model: the logits of Qwen3ForCausalLM are not its head", caplog.messages[-1])
    with pytest.raises(NotImplementedError, match=r"estimator='total_effects'.*requested because of model: the logits"):
        _ = maker(group, CounterfactualConfig(**TOTAL_EFFECTS)).access


def test_trees_are_named_in_the_log_and_what_asks_nothing_does_not_touch_the_actors(maker, caplog):
    caplog.set_level(logging.INFO, Workers.__module__)
    group = TreeActors(2)
    assert isinstance(maker(group, actors=2).access, Workers)
    assert re.fullmatch(r"credit: packed trees are scored on 2 workers in torch.float32", caplog.messages[-1])
    silent = TreeActors(2)
    for options in ({"control": "off"}, {"control": "random"}, {"estimator": "prefix_tree"}):
        asked = maker(silent, CounterfactualConfig(**options), actors=2)
        asked.compute_advantages_and_returns(experiences(SimpleNamespace))
    assert silent.sent == []


def test_openrlhfs_own_experience_maker_credits_by_trees(openrlhf, build):
    stock = build(None).compute_advantages_and_returns(experiences(openrlhf.Experience))
    maker = build(CounterfactualConfig(**TOTAL_EFFECTS), TreeActors(2), actors=2)
    made = maker.compute_advantages_and_returns(experiences(openrlhf.Experience))
    check_credited(made, stock, TOTAL_EFFECTS)


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
        runtime_env={"env_vars": {"DS_ACCELERATOR": "cpu"}, "worker_process_setup_hook": on_a_cpu},
    )  # fmt: skip
    on_a_cpu()
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
    options = TOTAL_EFFECTS
    own, maker = (
        maker(group, None, None, None, SimpleNamespace(value=0.0), strategy, tiny_tokenizer(), **credit)
        for maker, credit in ((RemoteExperienceMaker, {}), (kind, {"counterfactual": CounterfactualConfig(**options)}))
    )
    assert isinstance(maker.access, Workers)
    own = own.compute_advantages_and_returns(experiences(Experience))
    check_credited(maker.compute_advantages_and_returns(experiences(Experience)), own, options)
    refuses_a_bad_id(maker.access)
    check_credited(maker.compute_advantages_and_returns(experiences(Experience)), own, options)
    ray.shutdown()


def on_a_cpu(dtype: str = "fp32") -> None:
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


@pytest.mark.parametrize(
    ("stage", "dtype", "changes"),
    [
        (2, "fp32", {}), (3, "fp32", {}), (3, "bf16", {}), (3, "fp32", {"lora": 4}), (2, "fp32", {"copies": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_openrlhfs_own_actor_of_two_processes_scores_trees_as_one_process_does(stage, dtype, changes):
    skip_without("deepspeed", "openrlhf", "ray")
    run(2, on_openrlhfs_actor, stage, dtype, changes)


def test_under_ray_openrlhfs_group_of_two_actors_credits_by_trees_and_names_the_rank_of_an_error():
    skip_without("deepspeed", "openrlhf", "ray")
    code = f"from {__name__} import under_ray; under_ray(3)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
