"""Models whose weights are in pieces on several processes: results are those of one, and none waits for ever."""

from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from cfa_kernels import packed_logprobs, packed_policy_loss
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.sharded.fsdp import is_engine
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.rows import Rows
from cfa_kernels.span import Span
from tests.support.models import HYBRIDS, PLACEHOLDER, batch, make_model, score_columns, skip_unless_runs
from tests.support.sharded import deepspeed_engine, run, skip_unless_deepspeed, values, wrapped

pytestmark = pytest.mark.slow
BATCH = PROMPTS, COMPLETIONS, SPANS, ANSWERS = batch()
ALL = range(len(PROMPTS))
ADVANTAGES = torch.tensor([1.0, -0.5, 0.2, 0.7, -1.2, 0.3, 0.4])


def adapted(model: nn.Module) -> nn.Module:
    """Put LoRA on a model; its second factor is 0, as it starts."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0))


def alone_and_shared(how: str) -> tuple[nn.Module, nn.Module]:
    return make_model("Qwen3"), wrapped(make_model("Qwen3"), how)


def mlp_of(model: nn.Module, part: str = "mlp") -> nn.Module:
    layer = causal_lm(model).model.layers[1]
    return getattr(getattr(layer, "_fsdp_wrapped_module", layer), part)


def scores(model: nn.Module, rows: Sequence[int] = ALL):
    return score_columns(model, *([column[b] for b in rows] for column in BATCH), mask=PLACEHOLDER, token_budget=64)


def loss(model: nn.Module, rows: Sequence[int] = ALL, processes: int = 1, advantages: torch.Tensor = ADVANTAGES):
    """Loss of some rows, so that the mean over processes is that of the batch."""
    return packed_policy_loss(
        model, Rows([PROMPTS[b] for b in rows], [COMPLETIONS[b] for b in rows]), advantages=advantages[[*rows]],
        num_items_in_batch=sum(map(len, COMPLETIONS)) / processes, token_budget=64,
    )  # fmt: skip


def same(result, expected, rows: list[int], tolerance: float = 2e-5) -> None:
    for i, b in enumerate(rows):
        torch.testing.assert_close(result.base[i], expected.base[b], atol=tolerance, rtol=0, equal_nan=True)
        torch.testing.assert_close(result.drop[i], expected.drop[b], atol=2 * tolerance, rtol=0, equal_nan=True)


def same_gradients(ours: dict[str, torch.Tensor], alone: nn.Module, tolerance: float = 1e-4) -> None:
    expected = values(alone, gradients=True)
    assert ours.keys() == expected.keys()
    worst = max(((ours[name] - own).norm() / own.norm().clamp(min=1e-3)).item() for name, own in expected.items())
    assert worst < tolerance, worst


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if not is_engine(model):
        return values(model, gradients=True)
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p) for name, p in model.module.named_parameters() if p.requires_grad}


def as_one_process(
    rank: int, how: str, architecture: str, changes: dict, halves: bool = False, lora: bool = False
) -> None:
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


def errors(rank: int, shared: nn.Module) -> None:
    spans = [SPANS[0] if rank == 0 else [Span(0, 999)]]
    origin = "rank 1: " if rank == 0 else ""
    with pytest.raises(ValueError, match=f"^{origin}spans row 0, span 0: .0, 999."):
        score_columns(shared, PROMPTS[:1], COMPLETIONS[:1], spans, ANSWERS[:1], mask=PLACEHOLDER)
    rows = slice(0, 1 - rank)
    with pytest.raises(ValueError, match=f"^{origin}this process has no row to call backward on"):
        packed_logprobs(shared, Rows(PROMPTS[rows], COMPLETIONS[rows]))


def failing_layers(rank: int, how: str) -> None:
    """A layer that fails once in one process: all raise, or for want of memory that one feeds smaller packs."""
    alone, shared = alone_and_shared(how)
    expected, rows = scores(alone), [[0, 1, 2, 4], [5]][rank]
    same(scores(shared, rows), expected, rows)
    errors: list[Exception] = []

    def fails(module, args, kwargs):
        if rank == 0 and errors and next(iter([*args, *kwargs.values()])).shape[1] > 20:
            raise errors.pop()

    for inside, error in (("self_attn", RuntimeError("a broken layer")), ("mlp", torch.OutOfMemoryError("CUDA"))):
        hook = mlp_of(shared, inside).register_forward_pre_hook(fails, with_kwargs=True)
        same(scores(shared, rows), expected, rows)  # a model with another hook is checked again
        errors[:] = [error]
        if inside == "mlp":
            same(scores(shared, rows), expected, rows)
        else:
            with pytest.raises(RuntimeError, match=f"^{'rank 0: ' if rank else ''}a broken layer"):
                scores(shared, rows)
        assert bool(errors) == bool(rank)
        hook.remove()
        same(scores(shared, rows), expected, rows)
    (shared if how == "ZeRO-3" else torch.Tensor).backward(loss(shared, rows, 2).loss)
    failing_idle_pack(rank, shared)


def disagreeing(rank: int, how: str) -> None:
    shared = wrapped(make_model("Qwen3"), how)
    with pytest.raises(ValueError, match=r"^processes .* must make the same call"):
        loss(shared, [0, 1], 2) if rank == 0 else scores(shared, [2, 3])
    scores(shared, [0, 1])


def failing_idle_pack(rank: int, shared: nn.Module) -> None:
    """An error in a pack that is fed for the other process is raised in both."""
    rows = [[0, 1], []][rank]
    scores(shared, rows)

    broken = False

    def fails(module, args):
        if rank and broken:
            raise ZeroDivisionError("a broken layer")

    hook = mlp_of(shared).register_forward_pre_hook(fails)
    scores(shared, rows)
    broken = True
    kind = ZeroDivisionError if rank else RuntimeError
    with pytest.raises(kind, match=f"^{'' if rank else 'rank 1: ZeroDivisionError: '}a broken layer"):
        scores(shared, rows)
    hook.remove()
    scores(shared, rows)


def adapters(rank: int, how: str, halves: bool, dtype: torch.dtype) -> None:
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


def zero3_after_ordinary_steps(rank: int, lora: bool) -> None:
    alone, model = (adapted(make_model("Qwen3")) if lora else make_model("Qwen3") for _ in range(2))
    shared = deepspeed_engine(model)
    for _ in range(2):  # the first call registers the head, of which the record knows nothing
        for _ in range(3):
            shared.backward(0 * shared(input_ids=COMPLETIONS[0][None]).logits.sum())
            shared.step()
        ModelWalk.of(causal_lm(shared)).checked.clear()
        same(scores(shared, [rank]), scores(alone), [rank])


@pytest.mark.parametrize(
    ("how", "architecture", "changes"),
    [
        ("DDP", "Qwen3", {}), ("FSDP1", "Qwen3", {}), ("FSDP2, as accelerate", "Qwen3", {"tie_word_embeddings": True}),
        ("FSDP2", "Bamba", HYBRIDS["Bamba"]), ("FSDP2", "Qwen3Moe", {}),
        ("FSDP2, head apart", "Gemma2", {"tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_scores_gradients_and_steps_of_two_processes_are_those_of_one(how, architecture, changes):
    skip_unless_runs(architecture)
    run(2, as_one_process, how, architecture, changes)


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2, as accelerate", "ZeRO-3"])
def test_layers_that_fail_in_one_process_leave_none_waiting_nor_in_a_pack_that_is_fed_for_the_others(how):
    skip_unless_deepspeed(how)
    run(2, failing_layers, how)


@pytest.mark.parametrize(
    ("how", "halves", "dtype"),
    [
        ("FSDP1", False, torch.float32), ("FSDP1", True, torch.float32), ("FSDP2", False, torch.bfloat16),
        ("FSDP2, as accelerate", True, torch.float32), ("FSDP2, as accelerate", False, torch.float32),
    ],
)  # fmt: skip
def test_adapters_and_halves_are_scored_and_no_weight_is_changed_by_the_check(how, halves, dtype):
    run(2, adapters, how, halves, dtype)


@pytest.mark.parametrize("lora", [False, True], ids=["", "LoRA"])
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_gives_what_one_process_gives(stage, halves, lora):
    skip_unless_deepspeed("ZeRO-3")
    run(2, as_one_process, f"ZeRO-{stage}", "Qwen3", {}, halves, lora)


@pytest.mark.parametrize("lora", [False, True])
def test_zero_3_scores_after_ordinary_steps_that_gather_weights_ahead(lora):
    skip_unless_deepspeed("ZeRO-3")
    run(2, zero3_after_ordinary_steps, lora)


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2"])
def test_processes_that_call_a_model_differently_are_told_so(how):
    run(2, disagreeing, how)
