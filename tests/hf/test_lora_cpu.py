"""LoRA layers run as one op on a CPU compute what PEFT's own do, and leave no trace."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from cfa_kernels import packed_logprobs, score_counterfactuals
from cfa_kernels.hf import lora_cpu
from cfa_kernels.hf.lora_cpu import one_pass_adapters
from cfa_kernels.hf.model import causal_lm
from cfa_kernels.hf.verify import check_head
from cfa_kernels.ops.adapted_linear import adapted_linear
from cfa_kernels.scoring import training_forward
from cfa_kernels.span import Span
from tests.support.models import PLACEHOLDER, assert_equals_naive, make_model, tokens

SMALL = ([tokens(4)[0]] * 2, tokens(7, 6, seed=1), [[Span(1, 3)], [Span(0, 2)]], [Span(5, 7), Span(4, 6)])


def adapted(**config):
    torch.manual_seed(3)
    model = make_model("Qwen3", num_hidden_layers=1, hidden_size=32, intermediate_size=48, head_dim=8).cpu()
    options = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**options | config)).train()


def layer_of(model):
    return causal_lm(model).model.layers[0].mlp.down_proj


def calls(monkeypatch):
    """How often the op runs from now on."""
    made: list[int] = []
    monkeypatch.setattr(lora_cpu, "adapted_linear", lambda *args: made.append(1) or adapted_linear(*args))
    return made


@pytest.mark.parametrize("trains", ["all", "adapter", "input"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_op_is_its_formula_and_passes_gradcheck(bias, trains):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, trained):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(trained)

    base, adapter = trains == "all", trains != "input"
    x, weight = tensor(3, 5, trained=trains != "adapter"), tensor(4, 5, trained=base)
    shift = tensor(4, trained=base) if bias else None
    down, up = tensor(2, 5, trained=adapter), tensor(4, 2, trained=adapter)
    expected = x @ weight.t() + 0.7 * (x @ down.t()) @ up.t() + (0 if shift is None else shift)
    torch.testing.assert_close(adapted_linear(x, weight, shift, down, up, 0.7), expected)
    torch.autograd.gradcheck(lambda *inputs: adapted_linear(*inputs, 0.7), (x, weight, shift, down, up))


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_gradients_of_packed_logprobs_are_those_of_pefts_own_layers(checkpointing, monkeypatch):
    monkeypatch.setattr(training_forward, "check_trainable", check_head)
    made = calls(monkeypatch)

    def gradients(model):
        sum(row.square().sum() for row in packed_logprobs(model, *SMALL[:2])).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    own, model = adapted(), adapted()
    for module in own.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: None)  # so that PEFT calls it
    expected = gradients(own)
    assert not made
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    found = gradients(model)
    assert len(made) == (4 if checkpointing else 2)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_scores_of_adapted_models_are_their_own(monkeypatch):
    model, made = adapted(), calls(monkeypatch)
    scores = score_counterfactuals(model, *SMALL, placeholder_id=PLACEHOLDER)
    assert made
    assert_equals_naive(scores, model.eval(), *SMALL)


def merged(model):
    model.merge_adapter()


def disabled(model):
    model.base_model.disable_adapter_layers()


def two_adapters(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def half(model):
    model.to(torch.bfloat16)


def watched(model):
    layer_of(model).base_layer.register_forward_hook(lambda *_: None)


def own_forward(model):
    layer = layer_of(model)
    layer.forward = type(layer).forward.__get__(layer)


@pytest.mark.parametrize("change", [merged, disabled, two_adapters, half, watched, own_forward])
def test_what_is_no_plain_adapter_runs_as_peft_has_it(change, monkeypatch):
    model, made = adapted(), calls(monkeypatch)
    change(model)
    layer = layer_of(model)
    x = torch.randn(1, 3, 48, dtype=next(model.parameters()).dtype)
    expected = layer(x)
    with one_pass_adapters(causal_lm(model)):
        assert torch.equal(layer(x), expected)
    assert not made


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}])
def test_variants_dropout_and_biases_of_adapters_run_as_peft_has_them(config, monkeypatch):
    model, made = adapted(**config), calls(monkeypatch)
    with one_pass_adapters(causal_lm(model)):
        layer_of(model)(torch.randn(1, 3, 48))
    assert not made


def test_autocast_runs_as_peft_has_it(monkeypatch):
    model, made = adapted(), calls(monkeypatch)
    with one_pass_adapters(causal_lm(model)), torch.autocast("cpu", torch.bfloat16):
        assert layer_of(model)(torch.randn(1, 3, 48)).dtype == torch.bfloat16
    assert not made


def test_layers_come_back_also_after_an_error_and_from_within_themselves():
    model = adapted()
    before = dict(layer_of(model).__dict__)

    def fail():
        with one_pass_adapters(causal_lm(model)):
            with one_pass_adapters(causal_lm(model)):
                pass
            assert "forward" in layer_of(model).__dict__
            raise OSError("stop")

    with pytest.raises(OSError, match="stop"):
        fail()
    assert layer_of(model).__dict__ == before
