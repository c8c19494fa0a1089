"""What each of two processes does where a host's workers score trees: stand-ins of a host, and verl's own engine."""

import os
import tempfile
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from cfa_kernels import CounterfactualConfig, Credit, Span, counterfactual_credit
from cfa_kernels.integrations.workers import Found, Share, Workers, judge_share
from cfa_kernels.scoring.batch import ScoredBatch
from tests.support.log_prob_hosts import padded
from tests.support.sharded import wrapped
from tests.support.tiny import tiny_model, tiny_tokenizer

OPTIONS: list[dict[str, Any]] = [
    {},
    {"outcome": "mean"},
    {"effect": "total"},
    {"fill": "resampled", "samples": 2},
    {"preselect": 0.5, "preselect_by": "knockout"},
    {"estimator": "prefix_gain"},
]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, 0.7, -1.0, 1.0])


def credit(model: object, options: dict[str, Any], groups: Sequence[int]) -> Credit:
    """Credit of the batch of six by a model or an access to one."""
    return counterfactual_credit(
        model, tiny_tokenizer(), *padded(), advantages=ADVANTAGES, config=CounterfactualConfig(**options),
        generator=torch.Generator().manual_seed(3), groups=torch.tensor(groups), noise=1e-5,
    )  # fmt: skip


def as_one_process(rank: int, judge: Callable[[Share], Found], tolerance: float = 5e-5) -> None:
    """Credit by two workers is that of one process: uneven groups, a worker with nothing, an error of one worker."""

    def answer(share: Share) -> Any:
        try:
            return judge(share)
        except Exception as error:
            return error

    def ask(shares: list[Share]) -> list[Found]:
        sizes.append([len(share.batch) for share in shares])
        said: list[Any] = [None, None]
        dist.all_gather_object(said, answer(shares[rank]))
        for one in said:
            if isinstance(one, Exception):  # as Ray raises the first
                raise one
        return said

    sizes: list[list[int]] = []
    workers = Workers(ask, 2)
    for options, groups in [({}, [0] * 6), *((options, [0, 0, 0, 0, 1, 2]) for options in OPTIONS)]:
        found, expected = credit(workers, options, groups), credit(tiny_model().eval(), options, groups)
        assert expected.work is not None
        assert any(map(len, expected.drop))
        for ours, own in zip(found.drop, expected.drop, strict=True):
            torch.testing.assert_close(ours, own, atol=tolerance, rtol=0)
        torch.testing.assert_close(found.base, expected.base, atol=tolerance, rtol=0, equal_nan=True)
    assert sizes[0] in ([0, 5], [5, 0])  # of the sixth completion there is no answer
    assert all(min(share) > 0 for share in sizes[1:])
    refuses_a_bad_id(workers)
    assert workers.noise >= 1e-6


def refuses_a_bad_id(workers: Workers) -> None:
    """Workers name rank and row of an id that the model does not have."""
    ids = [torch.tensor(row) for row in ([14, 15, 18], [14, 999, 18])]
    spans, answers = [[Span(0, 1)]] * 2, [Span(2, 3)] * 2
    wrong = ScoredBatch.of(None, [torch.tensor([3]), torch.tensor([4])], ids, spans, answers, placeholder_id=0)
    named = r"rank \d: completions row 1: id 999 at position 1 is outside the vocabulary"
    with pytest.raises(ValueError, match=named):
        workers.score(wrong)


def on_a_sharded_model(rank: int, how: str) -> None:
    """Workers of a host that does nothing of its own."""
    model = tiny_model().eval()
    if how == "FSDP1, flat":  # as verl's, whose default is without the original parameters
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        shared: nn.Module = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    else:
        shared = wrapped(model, how)
    as_one_process(rank, partial(judge_share, shared))


def on_verls_engine(rank: int, param_dtype: str) -> None:
    """verl's FSDP2 engine on a CPU, for which verl has no platform; `TreeScoring` in a worker without Ray."""
    engine = _engine(param_dtype)
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from cfa_kernels.integrations.verl import TreeScoring

    worker = object.__new__(type("Worker", (TreeScoring, ActorRolloutRefWorker), {}))
    worker.actor = SimpleNamespace(engine=engine)
    as_one_process(rank, worker.score_trees, 5e-5 if param_dtype == "fp32" else 0.2)
    assert engine.mode is None


def _engine(param_dtype: str) -> Any:
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry

    class NoDevice(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: (0, 1) if name == "mem_get_info" else 0

    @PlatformRegistry.register("cpu")
    class PlatformCPU(PlatformCUDA):
        device_name = vendor_name = "cpu"
        device_module = NoDevice("no_device")
        is_available = is_platform_available = lambda self, *_, **__: True
        current_device = lambda self: "cpu"  # noqa: E731
        communication_backend_name = lambda self: "gloo"  # noqa: E731
        set_device = synchronize = empty_cache = lambda self, *_: None

    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 patches a class that trl 1.16 does not have
    with tempfile.TemporaryDirectory() as folder:
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        model = HFModelConfig(
            path=str(Path(folder)), use_remove_padding=False, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        )  # fmt: skip
        engine = FSDPEngineWithLMHead(
            model,
            FSDPEngineConfig(strategy="fsdp2", mixed_precision={"param_dtype": param_dtype}, use_torch_compile=False),
            FSDPOptimizerConfig(lr=1e-3, total_training_steps=2),
            CheckpointConfig(),
        )
        engine.initialize()
        dist.barrier()  # the folder goes when both have read it
    return engine
