"""Count the memory of training by model, set-up and card, for setups.md: nothing runs, and models have no memory."""

from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from cfa_kernels.model import limits
from cfa_kernels.model.walk import ModelWalk
from trainer.settings import TrainSettings

SHAPES = {"1.7B": (2048, 6144, 28, 16), "8B": (4096, 12288, 36, 32), "14B": (5120, 17408, 40, 40)}
SHAPES["32B"] = 5120, 25600, 64, 64  # as published for Qwen3: hidden size, intermediate size, layers, query heads
HEADS, WIDTH, VOCABULARY = 8, 128, 151_936  # of keys and values, of a head, of all models
CARDS = {"80 GB": 85_017_493_504, "141 GB": 150_109_880_320}  # bytes that CUDA reports for an H100 and an H200
SHARE = 0.95  # of a card; the rest is the driver's, and lost between allocations
PIECES, STRIP = 8, 4096 * VOCABULARY * 4  # processes of fsdp2; bytes of the logits that the loss makes at a time
SAMPLED = 64 * 1024  # tokens of keys and values of 64 completions, which the decoder keeps


@cache
def model_of(name: str, dtype: torch.dtype = torch.bfloat16, checkpointed: bool = False) -> Any:
    """Make a model on the meta device."""
    hidden, inner, layers, heads = SHAPES[name]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=HEADS, head_dim=WIDTH, vocab_size=VOCABULARY, tie_word_embeddings=name == "1.7B",
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    model.model.gradient_checkpointing = checkpointed
    return model


def counted(model: Any, free: float = 0) -> tuple[int, int]:
    """Count the bytes that a packed row keeps in compiled layers, and the rows of a micro-batch in `free` bytes."""
    numbers = {"mem_get_info": (int(free), 0), "memory_reserved": 0, "memory_allocated": 0}
    with ExitStack() as stack:
        for name, value in numbers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(mock.patch.object(limits, "input_device", return_value=torch.device("cuda")))
        stack.enter_context(mock.patch.object(limits, "any_liger", return_value=True))  # fused, as compiled ones are
        return limits.kept_per_row(ModelWalk.of(model)), limits.default_token_budget(model, training=True)


def models() -> str:
    """The table of what models hold, and keep of a row."""
    lines = ["| | weights, GB | packed row, KB | checkpointed, KB | a token's keys, values, KB |", f"|---|{'--:|' * 4}"]
    for name, (_, _, layers, _) in SHAPES.items():
        rows = [counted(model_of(name, checkpointed=checkpointed))[0] for checkpointed in (False, True)]
        sizes = [f"{size / 1e3:.0f}" for size in (*rows, layers * 2 * HEADS * WIDTH * 2)]
        lines.append(f"| {name} | {2 * model_of(name).num_parameters() / 1e9:.0f} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def held(name: str) -> dict[str, tuple[torch.dtype, float, float]]:
    """Count the bytes that a process holds by set-up: type of the weights, while it trains, while it samples."""
    linear = [m for key, m in model_of(name).named_modules() if isinstance(m, nn.Linear) and key != "lm_head"]
    weights, adapted = model_of(name).num_parameters(), sum(m.weight.numel() for m in linear)
    adapter = TrainSettings.lora_r * sum(m.in_features + m.out_features for m in linear)
    lora, cached = 2 * weights + 16 * adapter, SAMPLED * SHAPES[name][2] * 2 * HEADS * WIDTH * 2
    # What trains takes 16 bytes in float32, with gradient and moments; a bfloat16 copy samples, autocast makes another
    # in a micro-batch; all are whole while fsdp2 samples.
    piece = 16 * weights / PIECES
    return {
        "LoRA": (torch.bfloat16, lora + cached, lora + cached + 2 * adapted),
        "LoRA, vLLM on other GPUs": (torch.bfloat16, lora, lora),
        "all weights, `ddp`": (torch.float32, 20 * weights + cached, 18 * weights + cached),
        "all weights, `fsdp2`": (torch.float32, piece + 4 * weights + cached, piece + 6 * weights + cached),
    }


def micro_batches() -> str:
    """The table of what set-ups hold, and of the micro-batches that then fit a card."""
    cards = " | ".join(f"packed tokens, {card}" for card in CARDS)
    lines = [f"| | | training, GB | sampling, GB | {cards} |", f"|---|---|{4 * '--:|'}"]
    for name in SHAPES:
        for setup, (dtype, training, sampling) in held(name).items():
            cells = []
            for room in (SHARE * memory for memory in CARDS.values()):
                free, fits = room - training - STRIP, room >= max(sampling, training + STRIP)
                both = [counted(model_of(name, dtype, checkpointed), max(free, 0)) for checkpointed in (False, True)]
                some = [f"{rows // 1000}k" if fits and rows * row <= free else "no" for row, rows in both]
                cells.append(" / ".join(dict.fromkeys(some)))
            lines.append(f"| {name} | {setup} | {training / 1e9:.0f} | {sampling / 1e9:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)
