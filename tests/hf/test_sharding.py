"""Models whose weights are in pieces on several processes: results are those of one, and none waits for ever."""

import pytest
import torch

from tests.support import sharded
from tests.support.models import HYBRIDS, skip_unless_runs

pytestmark = pytest.mark.slow


def skip_unless_deepspeed(how: str) -> None:
    """Skip what DeepSpeed shares out where it is not installed."""
    if how == "ZeRO-3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


@pytest.mark.parametrize(
    ("how", "architecture", "changes"),
    [
        ("DDP", "Qwen3", {}),
        ("FSDP1", "Qwen3", {}),
        ("FSDP2", "Qwen3", {}),
        ("FSDP2, as accelerate", "Qwen3", {"tie_word_embeddings": True}),
        ("FSDP2", "Bamba", HYBRIDS["Bamba"]),
        ("FSDP2", "Qwen3Moe", {}),
        ("FSDP2, head apart", "Gemma2", {"tie_word_embeddings": False}),
    ],
)
def test_scores_gradients_and_steps_of_two_processes_are_those_of_one(how, architecture, changes):
    skip_unless_runs(architecture)
    sharded.run(2, sharded.as_one_process, how, architecture, changes)


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2, as accelerate", "ZeRO-3"])
@pytest.mark.parametrize(
    ("error", "inside"), [(RuntimeError, "self_attn"), (torch.OutOfMemoryError, "mlp")], ids=["error", "memory"]
)
def test_a_layer_that_fails_in_one_process_leaves_none_waiting(how, error, inside):
    skip_unless_deepspeed(how)
    sharded.run(2, sharded.failing_layer, how, error, inside)


@pytest.mark.parametrize(
    ("how", "halves", "dtype"),
    [
        ("FSDP1", False, torch.float32),
        ("FSDP1", True, torch.float32),
        ("FSDP2", False, torch.bfloat16),
        ("FSDP2, as accelerate", True, torch.float32),
        ("FSDP2, as accelerate", False, torch.float32),
    ],
)
def test_adapters_and_halves_are_scored_and_no_weight_is_changed_by_the_check(how, halves, dtype):
    sharded.run(2, sharded.adapters, how, halves, dtype)


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2, as accelerate"])
def test_estimators_and_credit_of_two_processes_of_which_one_judges_nothing(how):
    sharded.run(2, sharded.estimators, how)


@pytest.mark.parametrize("lora", [False, True], ids=["", "LoRA"])
@pytest.mark.parametrize("halves", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_gives_what_one_process_gives(stage, halves, lora):
    skip_unless_deepspeed("ZeRO-3")
    sharded.run(2, sharded.as_one_process, f"ZeRO-{stage}", "Qwen3", {}, halves, lora)


@pytest.mark.parametrize("lora", [False, True])
def test_zero_3_scores_after_ordinary_steps_that_gather_weights_ahead(lora):
    skip_unless_deepspeed("ZeRO-3")
    sharded.run(2, sharded.zero3_after_ordinary_steps, lora)


@pytest.mark.parametrize("how", ["DDP", "FSDP1", "FSDP2, as accelerate"])
def test_forward_credit_and_loss_in_one_call_as_the_page_shows(how):
    sharded.run(2, sharded.in_one_call, how)


def test_another_model_is_asked_inside_the_call_of_one_by_each_process_as_often_as_it_likes():
    sharded.run(2, sharded.another_model, "FSDP2")


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2", "ZeRO-3"])
def test_an_error_in_a_pack_that_is_fed_for_the_others_is_raised_on_all(how):
    skip_unless_deepspeed(how)
    sharded.run(2, sharded.failing_idle_pack, how)


@pytest.mark.parametrize("how", ["FSDP1", "FSDP2"])
def test_processes_that_call_a_model_differently_are_told_so(how):
    sharded.run(2, sharded.disagreeing, how)


def test_four_processes_of_which_one_has_no_work_are_one():
    sharded.run(4, sharded.as_one_of_four, "FSDP2")
