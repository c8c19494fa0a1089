"""Work of each of several processes in `tests/hf/test_sharding.py`, and a way to run them with a deadline.

They are forked from a server that has imported everything once, and talk by gloo.
"""

import contextlib
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from cfa_kernels import (
    CounterfactualConfig,
    TrainingForward,
    counterfactual_credit,
    packed_forward,
    packed_logprobs,
    packed_policy_loss,
)
from cfa_kernels.estimators.masking import Masking
from cfa_kernels.hf.fsdp import is_engine, is_zero3
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.hf.sharding import run_inside
from cfa_kernels.hf.verify import _BY_MODEL
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.access import as_access
from cfa_kernels.span import Span
from tests.support.forking import server
from tests.support.models import PLACEHOLDER, batch, batch_of, make_model, score_columns
from tests.support.tiny import tiny_model, tiny_tokenizer

SECONDS = 300  # only a hang takes as long, however busy the machine is
BATCH = PROMPTS, COMPLETIONS, SPANS, ANSWERS = batch()
ALL = range(len(PROMPTS))
ADVANTAGES = torch.tensor([1.0, -0.5, 0.2, 0.7, -1.2, 0.3, 0.4])
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


def adapted(model: nn.Module) -> nn.Module:
    """Put LoRA on a model; its second factor is 0, as it starts."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0))


def wrapped(model: nn.Module, how: str, halves: bool = False) -> nn.Module:
    """Distribute a model: the ways that people and hosts do."""
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


def alone_and_shared(how: str) -> tuple[nn.Module, nn.Module]:
    """The same model in this process, and distributed."""
    return make_model("Qwen3"), wrapped(make_model("Qwen3"), how)


def mlp_of(model: nn.Module, part: str = "mlp") -> nn.Module:
    """A part of the second layer of a distributed model."""
    layer = causal_lm(model).model.layers[1]
    return getattr(getattr(layer, "_fsdp_wrapped_module", layer), part)


def scores(model: nn.Module, rows: Sequence[int] = ALL):
    """Scores of some rows of the batch."""
    return score_columns(model, *([column[b] for b in rows] for column in BATCH), mask=PLACEHOLDER, token_budget=64)


def loss(model: nn.Module, rows: Sequence[int] = ALL, processes: int = 1, advantages: torch.Tensor = ADVANTAGES):
    """Loss of some rows, so that the mean over processes is that of the batch."""
    return packed_policy_loss(
        model, Rows([PROMPTS[b] for b in rows], [COMPLETIONS[b] for b in rows]), None, advantages[[*rows]],
        num_items_in_batch=sum(map(len, COMPLETIONS)) / processes, token_budget=64,
    )  # fmt: skip


def same(result, expected, rows: list[int], tolerance: float = 2e-5) -> None:
    """Hold scores of some rows to those of the whole batch."""
    for i, b in enumerate(rows):
        torch.testing.assert_close(result.base[i], expected.base[b], atol=tolerance, rtol=0, equal_nan=True)
        torch.testing.assert_close(result.drop[i], expected.drop[b], atol=2 * tolerance, rtol=0, equal_nan=True)


def same_gradients(ours: dict[str, torch.Tensor], alone: nn.Module, tolerance: float = 1e-4) -> None:
    """Hold gradients to those of the model that is in one process."""
    expected = values(alone, gradients=True)
    assert ours.keys() == expected.keys()
    worst = max(((ours[name] - own).norm() / own.norm().clamp(min=1e-3)).item() for name, own in expected.items())
    assert worst < tolerance, worst


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    if not is_engine(model):
        return values(model, gradients=True)
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p) for name, p in model.module.named_parameters() if p.requires_grad}


def values(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Whole weights by name, or their gradients."""

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
        named = {n.replace("_fsdp_wrapped_module.", "").removeprefix("module."): p for n, p in model.named_parameters()}
        return {n: whole(p.grad if gradients else p) for n, p in named.items() if not gradients or p.grad is not None}


def as_one_process(
    rank: int, how: str, architecture: str, changes: dict, halves: bool = False, lora: bool = False
) -> None:
    """Scores, gradients, two optimizer steps and errors of two processes are those of one."""
    alone, model = (make_model(architecture, **changes) for _ in range(2))
    if lora:
        alone, model = adapted(alone), adapted(model)
    shared, tolerance, expected = wrapped(model, how, halves), 1.0 if halves else 2e-5, scores(alone)
    for rows in ([[0, 1, 2, 3, 4, 5], [6]], [[], [0, 3]], [[0, 2, 4, 6], [1, 3, 5]]):
        same(scores(shared, rows[rank]), expected, rows[rank], tolerance)
    own, ours = (torch.optim.SGD(model.parameters(), lr=0.05) for model in (alone, shared))
    engine = shared if how.startswith("ZeRO") else None
    for rows, advantages in (
        ([[0, 2, 4, 6], [1, 3, 5]], ADVANTAGES),
        ([[*ALL], [6]], ADVANTAGES * (rank == 0)),  # a row without advantage is not fed
    ):
        for optimizer in (own, ours):
            optimizer.zero_grad()
        loss(alone).loss.backward()
        result = loss(shared, rows[rank], 2, advantages).loss
        (engine or torch.Tensor).backward(result)
        same_gradients(gradients_of(shared), alone, 0.2 if halves else 1e-4)
        own.step()
        (engine or ours).step()
    expected = scores(alone)
    same(scores(shared, [rank, 2 + rank]), expected, [rank, 2 + rank], max(tolerance, 1e-4))
    if how not in ("DDP", "ZeRO-1", "ZeRO-2"):
        errors(rank, shared)
    if how == "ZeRO-3":
        with pytest.raises(NotImplementedError, match="are pieces, and nothing that wraps it gathers them"):
            scores(shared.module, [rank])
    same(scores(shared, [rank]), expected, [rank], max(tolerance, 1e-4))


def as_one_of_four(rank: int, how: str) -> None:
    """Scores and gradients of four processes, one of them without work, are those of one."""
    alone, shared = alone_and_shared(how)
    rows = [[0, 1, 2], [], [3], [4, 5, 6]][rank]
    same(scores(shared, rows), scores(alone), rows)
    loss(alone).loss.backward()
    loss(shared, rows or [0], 4, ADVANTAGES * bool(rows)).loss.backward()
    same_gradients(gradients_of(shared), alone)


def errors(rank: int, shared: nn.Module) -> None:
    """An error of one process is raised in all, and names it."""
    spans = [SPANS[0] if rank == 0 else [Span(0, 999)]]
    origin = "rank 1: " if rank == 0 else ""
    with pytest.raises(ValueError, match=f"^{origin}spans row 0, span 0: .0, 999."):
        score_columns(shared, PROMPTS[:1], COMPLETIONS[:1], spans, ANSWERS[:1], mask=PLACEHOLDER)
    rows = slice(0, 1 - rank)
    with pytest.raises(ValueError, match=f"^{origin}this process has no row to call backward on"):
        packed_logprobs(shared, Rows(PROMPTS[rows], COMPLETIONS[rows]))


def failing_layer(rank: int, how: str, error: type[Exception], inside: str) -> None:
    """A layer that fails once in one process: all raise, or for want of memory that one feeds smaller packs."""
    alone, shared = alone_and_shared(how)
    expected = scores(alone)
    rows = [[0, 1, 2, 4], [5]][rank]
    same(scores(shared, rows), expected, rows)
    left = [1]

    def fails(module, args, kwargs):
        if rank == 0 and left and next(iter([*args, *kwargs.values()])).shape[1] > 20:
            left.pop()
            raise error("CUDA out of memory" if error is torch.OutOfMemoryError else "a broken layer")

    hook = mlp_of(shared, inside).register_forward_pre_hook(fails, with_kwargs=True)
    if error is torch.OutOfMemoryError:
        same(scores(shared, rows), expected, rows)
    else:
        with pytest.raises(RuntimeError, match=f"^{'rank 0: ' if rank else ''}a broken layer"):
            scores(shared, rows)
    assert bool(left) == bool(rank)
    hook.remove()
    same(scores(shared, rows), expected, rows)
    (shared if how == "ZeRO-3" else torch.Tensor).backward(loss(shared, rows, 2).loss)


def disagreeing(rank: int, how: str) -> None:
    """Processes that call a shared model differently, or have different ones, are told so; then they agree again."""
    shared = wrapped(make_model("Qwen3"), how)
    with pytest.raises(ValueError, match=r"^processes .*: rank 0 has Qwen3.*, with gradients, rank 1 .*, without grad"):
        loss(shared, [0, 1], 2) if rank == 0 else scores(shared, [2, 3])
    sizes = causal_lm(shared).config
    own = sizes.vocab_size
    sizes.vocab_size = own + rank
    with pytest.raises(ValueError, match=rf"rank 0 has .*vocab_size={own}, .*rank 1 has .*vocab_size={own + 1}, "):
        scores(shared, [0, 1])
    sizes.vocab_size = own
    scores(shared, [0, 1])


def failing_idle_pack(rank: int, how: str) -> None:
    """A process without rows whose layer fails while the other feeds: both raise what it raised."""
    shared = wrapped(make_model("Qwen3"), how)
    rows = [[0, 1], []][rank]
    scores(shared, rows)

    def fails(module, args):
        if rank:
            raise ZeroDivisionError("a broken layer")

    hook = mlp_of(shared).register_forward_pre_hook(fails)
    kind = ZeroDivisionError if rank else RuntimeError
    with pytest.raises(kind, match=f"^{'' if rank else 'rank 1: ZeroDivisionError: '}a broken layer"):
        scores(shared, rows)
    hook.remove()
    scores(shared, rows)


def adapters(rank: int, how: str, halves: bool, dtype: torch.dtype) -> None:
    """Adapters, bfloat16 weights and mixed precision: scores agree, the check leaves every weight as it was."""
    alone, shared = (adapted(make_model("Qwen3").to(dtype)) for _ in range(2))
    shared = wrapped(shared, how, halves)
    before = values(shared)
    expected = scores(alone.to(torch.bfloat16) if halves else alone)
    rows = [[0, 1, 2, 3, 4, 5], [6]][rank]
    # Mixed precision keeps norms and products apart from those of a model in bfloat16 by some roundings.
    same(scores(shared, rows), expected, rows, 0.5 if halves else 2e-5)
    assert all(torch.equal(before[name], after) for name, after in values(shared).items())
    result = loss(shared, rows, 2)
    assert result.loss.dtype == result.logprobs[0].dtype == torch.float32
    result.loss.backward()
    second = {name: gradient for name, gradient in values(shared, gradients=True).items() if "lora_B" in name}
    assert second
    assert all(gradient.isfinite().all() and gradient.any() for gradient in second.values())


def ids_of(*texts: str) -> torch.Tensor:
    """Ids of words and phrases of the tiny tokenizer."""
    return torch.tensor(tiny_tokenizer().convert_tokens_to_ids(texts))


QUESTION = "What", "is", "3", "+", "4", "?"
SOLUTIONS = ("3 + 4 = 7. ", "So we add them up. ", "#### 7"), ("7 - 2 = 5. ", "Then half is left. ", "#### 5")


def estimators(rank: int, how: str) -> None:
    """Estimators that query the model several times, one process with nothing to judge; and credit as a whole."""
    alone, shared = alone_and_shared(how)
    rows = [[2, 4], []][rank]  # whose units are disjoint
    columns = [[column[b] for b in rows] for column in BATCH]

    def judged(model: nn.Module, estimator: Masking):
        access = as_access(model)
        return access.run(lambda: estimator(access, batch_of(model, *columns)).values if rows else [])

    for options in (
        {}, {"effect": "total"}, {"outcome": "mean"}, {"mask": "resampled", "samples": 2}, {"preselect": 0.5},
    ):  # fmt: skip
        results = (judged(model, Masking(**options)) for model in (alone, shared))
        for own, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, own, atol=5e-5, rtol=0, equal_nan=True)
    tokenizer, ids = tiny_tokenizer(), Rows([ids_of(*QUESTION)] * 2, [ids_of(*SOLUTIONS[0])] * 2)
    for config in (CounterfactualConfig(), CounterfactualConfig(estimator="prefix_gain")):
        tiny = wrapped(tiny_model(), how)
        options = {"advantages": torch.tensor([1.0, -1.0]) * (rank == 0), "config": config}
        expected, credit = (counterfactual_credit(m, tokenizer, ids, **options).padded() for m in (tiny_model(), tiny))
        torch.testing.assert_close(credit, expected, atol=1e-3, rtol=0)
        assert (credit != 1).any() == (rank == 0)
    with pytest.raises(NotImplementedError, match="gradients through the model itself, whole in this process"):
        counterfactual_credit(tiny, tokenizer, ids, config=CounterfactualConfig(estimator="gradient"))


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
    """Share a model out by DeepSpeed, with plain gradient descent."""
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


def zero3_after_ordinary_steps(rank: int, lora: bool) -> None:
    """A model is scored once DeepSpeed has recorded in which order its weights are read, and gathers them ahead."""
    alone, model = (adapted(make_model("Qwen3")) if lora else make_model("Qwen3") for _ in range(2))
    shared = deepspeed_engine(model)
    for _ in range(2):  # the first call registers the head, of which the record knows nothing
        for _ in range(3):
            shared.backward(0 * shared(input_ids=COMPLETIONS[0][None]).logits.sum())
            shared.step()
        _BY_MODEL.clear()
        same(scores(shared, [rank]), scores(alone), [rank])


def in_one_call(rank: int, how: str) -> None:
    """The page's function: forward, credit and loss in one call of the wrapper, of one process without credit."""
    page = (Path(__file__).parents[2] / "docs" / "plain_pytorch.md").read_text(encoding="utf-8")
    (block,) = [one for one in page.split("```") if one.startswith("python") and "def loss_with_credit" in one]
    names: dict[str, Callable] = {}
    exec(block.removeprefix("python"), names)
    rows = Rows([ids_of(*QUESTION)] * 2, [ids_of(*solution) for solution in SOLUTIONS])
    advantages = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    alone, tiny = tiny_model(), tiny_model()
    shared = wrapped(tiny, how)
    for model, causal, which in ((alone, alone, 0), (shared, tiny, rank)):
        names["loss_with_credit"](model, causal, tiny_tokenizer(), rows, advantages[which], 6.0).loss.backward()
    ours = values(shared, gradients=True)
    for name, gradient in values(alone, gradients=True).items():  # the mean over processes, one without a gradient
        torch.testing.assert_close(2 * ours[name], gradient, atol=1e-6, rtol=1e-4)

    def by_gradients() -> None:
        forward = packed_forward(tiny, rows, keep_states=True)
        config = CounterfactualConfig("gradient")
        counterfactual_credit(TrainingForward(forward), tiny_tokenizer(), rows, config=config)

    if how != "DDP":
        with pytest.raises(NotImplementedError, match=r"^estimator='gradient': it needs gradients through the model"):
            run_inside(shared, by_gradients, trains=True)


def another_model(rank: int, how: str) -> None:
    """Inside the call of one model a process asks another, that it holds whole, as often as it likes."""
    reference, policy = make_model("Llama"), make_model("Qwen3")
    shared, rows = wrapped(policy, how), Rows(PROMPTS[:1], COMPLETIONS[:1])
    expected = packed_logprobs(reference, rows)[0].detach()

    def body() -> torch.Tensor:
        for _ in range(2 * rank):
            torch.testing.assert_close(packed_logprobs(reference, rows)[0], expected)
        return scores(policy, [rank]).base

    base = run_inside(shared, body)
    torch.testing.assert_close(base, scores(make_model("Qwen3"), [rank]).base, atol=2e-5, rtol=0)
