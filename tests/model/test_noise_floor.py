"""How far rounding moves log-probs from a packed tree, as a probe measures it."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cfa_kernels.model.check import verify
from cfa_kernels.model.check.accuracy import FLOAT32_NOISE, noise_floor
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, make_model, score_columns, tokens


def drops(model, answer):
    prompts, completions = tokens(*[8] * 6), tokens(*[40] * 6, seed=1)
    spans = [[Span(i, i + 1) for i in range(0, 32, 4)]] * 6
    scores = score_columns(model, prompts, completions, spans, [answer] * 6, mask=PLACEHOLDER)
    return torch.stack(scores.drop)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2"])
def test_rounding_of_halves_moves_drops_about_as_far_as_was_measured(name, length):
    answer = Span(34, 34 + length)
    halves = make_model(name, initializer_range=0.1).bfloat16()
    exact = drops(make_model(name, initializer_range=0.1).bfloat16().float(), answer)
    noise = noise_floor(halves) * math.sqrt(2 * length)
    error = (drops(halves, answer) - exact).square().mean().sqrt().item()
    assert noise / 15 < error < noise  # a third is expected
    assert noise > 100 * FLOAT32_NOISE


def test_noise_is_of_the_arithmetic_in_force_and_its_measure_leaves_adapters_and_modes_alone():
    adapted = get_peft_model(make_model("Qwen3"), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)).train()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    assert noise_floor(adapted) == FLOAT32_NOISE
    with torch.autocast("cpu", torch.bfloat16):
        assert noise_floor(adapted) > 100 * FLOAT32_NOISE
    assert all(module.training for module in adapted.modules())
    torch.testing.assert_close(adapted.state_dict(), before, rtol=0, atol=0)


def test_noise_of_layers_that_cannot_run_in_float32_is_measured_in_their_own_dtype():
    model = make_model("Qwen3").bfloat16()
    verify.check_supported(model)

    def halves_only(module, args):
        if args[0].dtype != torch.bfloat16:
            raise RuntimeError("expected bfloat16")

    model.model.layers[0].mlp.register_forward_pre_hook(halves_only)
    assert FLOAT32_NOISE < noise_floor(model) < 1
