"""Work in several processes with a deadline, and models that they share; they are forked from one server, on gloo."""

import contextlib
import datetime
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.sharded.fsdp import is_zero3
from tests.support.forking import server

SECONDS = 300  # only a hang takes as long, however busy the machine is
_WRAPPERS = r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|^module\."
HALVES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def run(processes: int, work: Callable[..., None], *arguments: object) -> None:
    """Run `work(rank, *arguments)` in each process; raise what one raised, or `TimeoutError` if one does not end."""
    server()
    deadline = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        started = start_processes(
            _one, (processes, folder, work, arguments), processes, join=False, daemon=True, start_method="forkserver"
        )
        while not started.join(max(deadline - time.monotonic(), 0)):
            if time.monotonic() >= deadline:
                hung = [rank for rank, process in enumerate(started.processes) if process.is_alive()]
                for process in started.processes:
                    process.kill()
                raise TimeoutError(f"ranks {hung} did not end in {SECONDS} seconds")


def _one(rank: int, processes: int, folder: str, work: Callable[..., None], arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "DS_ACCELERATOR": "cpu"}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=SECONDS),
    )  # fmt: skip
    work(rank, *arguments)
    dist.barrier()  # a process that ends while the other still talks to it may abort
    dist.destroy_process_group()


def wrapped(model: nn.Module, how: str, halves: bool = False) -> nn.Module:
    inner = causal_lm(model)
    layers = inner.model.layers
    if how.startswith("ZeRO"):
        return deepspeed_engine(model, halves, int(how[-1]))
    if how == "DDP":
        return DistributedDataParallel(model)
    if how == "FSDP1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}), use_orig_params=True,
            device_id=torch.device("cpu"), mixed_precision=MixedPrecision(**HALVES) if halves else None,
        )  # fmt: skip
    policy = MixedPrecisionPolicy(**HALVES, output_dtype=torch.bfloat16) if halves else MixedPrecisionPolicy()
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    if how == "FSDP2, as accelerate":
        ends = [inner.model.norm, inner.lm_head]
        if inner.lm_head.weight is inner.model.embed_tokens.weight:
            ends.insert(1, inner.model.embed_tokens)
        else:
            fully_shard(inner.model.embed_tokens, mp_policy=policy)
        fully_shard(ends, reshard_after_forward=False, mp_policy=policy)
    elif how == "FSDP2, head apart":
        fully_shard(inner.lm_head, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def values(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    gathered = contextlib.ExitStack()
    if isinstance(model, FullyShardedDataParallel):
        gathered.enter_context(FullyShardedDataParallel.summon_full_params(model, with_grads=gradients))
    elif is_zero3(model):
        import deepspeed

        for parameter in model.parameters():
            gathered.enter_context(deepspeed.zero.GatheredParameters([parameter]))
    with gathered:
        named = {re.sub(_WRAPPERS, "", name): parameter for name, parameter in model.named_parameters()}
        return {n: whole(p.grad if gradients else p) for n, p in named.items() if not gradients or p.grad is not None}


def skip_unless_deepspeed(how: str) -> None:
    """Skip the test of a model that DeepSpeed shares out where it is not installed."""
    if how.startswith("ZeRO"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


def deepspeed_on_a_cpu(*, in_order: bool) -> Any:
    """Import DeepSpeed without its operation in shared memory: compiled for minutes, and for speed only.

    It waits for the last of several gathers only, which on a device ends last, and under gloo at any time. With
    `in_order` each ends at once; else those before the last never end, so whoever gathers several weights at once
    finds out.
    """
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    gather = sys.modules["deepspeed.comm.comm"].all_gather_into_tensor

    def gathered(output: torch.Tensor, *inputs: Any, async_op: bool = False, **options: Any) -> Any:
        def run() -> Any:
            return gather(output, *inputs, **options)

        if not async_op:
            return run()
        if in_order:
            run()
            return SimpleNamespace(wait=lambda: None)
        output.fill_(float("nan"))
        return SimpleNamespace(wait=run)

    deepspeed.comm.all_gather_into_tensor = gathered
    return deepspeed


def deepspeed_engine(model: nn.Module, halves: bool = False, stage: int = 3) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed_on_a_cpu(in_order=False).initialize(
        model=model, model_parameters=trained, optimizer=torch.optim.SGD(trained, lr=0.05),
        config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "gradient_clipping": 1e9,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": halves},
        },
    )  # fmt: skip
    return engine
