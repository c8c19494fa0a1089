"""Merging adapters for sampling and scoring: the same results, and the same bits of the weights afterwards."""

import re

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn

from cfa_kernels.model.merged import CannotMerge, adapted_layers, merged_adapters, merged_weights
from cfa_kernels.model.modes import value_of
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.sharded.ranks import INSIDE, Ranks
from cfa_kernels.model.state import ModelState
from tests.support.adapted import PROMPTS, SAMPLED, adapted, tiny, tokenizer
from tests.support.models import MOE, make_model
from trainer.rollouts.in_process import TransformersEngine


def bits(model: nn.Module) -> dict[str, tuple]:
    """Values of every weight, where it is, and how often it was written to."""
    return {
        name: (tensor.detach().clone(), tensor.data_ptr(), tensor._version)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def assert_same_bits(before: dict[str, tuple], after: dict[str, tuple]) -> None:
    assert before.keys() == after.keys()
    for name, (values, *rest) in before.items():
        assert values.is_meta or torch.equal(values, after[name][0]), name
        assert rest == list(after[name][1:]), name


KINDS = {
    "lora": {},
    "rslora on some": {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "two adapters": {"adapters": 2},
    "dora": {"use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "a head that trains": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_merged_adapters_sample_the_same_and_leave_the_same_bits(options) -> None:
    model = adapted(tiny(tie_word_embeddings=False), **options)
    engine, apart = TransformersEngine(model, tokenizer()), TransformersEngine(model, tokenizer())
    state, before = ModelState(causal_lm(model)), bits(model)
    apart._merges = False
    beside, merged = apart(PROMPTS, **SAMPLED), engine(PROMPTS, **SAMPLED)
    assert engine.notes == []
    assert beside.ids() == merged.ids()
    torch.testing.assert_close(beside.logprobs, merged.logprobs, rtol=1e-6, atol=1e-6)
    with merged_adapters(model):  # a CUDA graph reads them where they were
        assert all(weight.data_ptr() == before[name][1] for name, weight in model.named_parameters())
    assert_same_bits(before, bits(model))
    assert state.holds(causal_lm(model))
    assert adapted_layers(model)


def test_adapters_of_one_modules_parameters_leave_the_same_bits_wherever_peft_puts_the_merged_ones() -> None:
    parameters = ["gate_up_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    model = get_peft_model(make_model("Qwen3Moe", num_hidden_layers=1, **MOE), config)
    before, layers = bits(model), adapted_layers(model)
    for layer in layers.values():

        def merge(layer: nn.Module = layer) -> None:
            type(layer).merge(layer)
            for parameter in layer.parameters():
                parameter.data = parameter.data.clone()

        layer.merge = merge
    with merged_adapters(model) as count:
        assert count == len(layers) == 2  # one wraps the other
        assert any(not torch.equal(values, before[name][0]) for name, (values, *_) in bits(model).items())
    assert_same_bits(before, bits(model))


def test_layers_that_merge_by_exchanging_modules_have_their_own_again() -> None:
    model, rows = get_peft_model(tiny(), LNTuningConfig(target_modules=["input_layernorm"])), torch.tensor([PROMPTS[1]])
    for parameter in (one for one in model.parameters() if one.requires_grad):
        nn.init.normal_(parameter)
    before, expected = bits(model), model(rows).logits
    for _ in range(2):
        with merged_adapters(model) as count:
            assert count == 2
            assert torch.equal(model(rows).logits, expected)
        assert_same_bits(before, bits(model))
    [*adapted_layers(model).values()][-1].merge = lambda: 1 / 0  # the first has been merged by then
    with pytest.raises(CannotMerge), merged_adapters(model):
        pass
    assert_same_bits(before, bits(model))
    assert torch.equal(model(rows).logits, expected)


def tied() -> PeftModel:
    return adapted(tiny(tie_word_embeddings=True), target_modules=["embed_tokens", "q_proj"])


def quantised() -> PeftModel:
    model = adapted(tiny(), target_modules=["q_proj"])
    layer = causal_lm(model).model.layers[1].self_attn.q_proj.base_layer
    layer.weight = nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def unmergeable() -> PeftModel:
    model = adapted(tiny(), target_modules=["q_proj", "v_proj"])
    layer = causal_lm(model).model.layers[1].self_attn.v_proj
    layer.merge = lambda: (_ for _ in ()).throw(NotImplementedError("this kind stays beside"))
    return model


def linears(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in model.named_parameters() if "base_layer" in name}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_merged_scores_run_on_what_samples_and_weights_keep_their_bits(options) -> None:
    model = adapted(tiny(torch.bfloat16, tie_word_embeddings=False), **options)
    state, before = ModelState(causal_lm(model)), bits(model)
    with merged_adapters(model):
        expected = linears(model)
    with merged_weights(causal_lm(model)):
        assert not adapted_layers(model)
        torch.testing.assert_close(linears(model), expected, rtol=0, atol=0)
    with pytest.raises(KeyError), merged_weights(causal_lm(model)):
        raise KeyError
    assert_same_bits(before, bits(model))
    assert state.holds(causal_lm(model))
    assert adapted_layers(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_adapters_are_merged_outside_of_autocast(dtype) -> None:
    """And no cast of an unmerged weight that autocast keeps, of one that trains, takes a merged one's place."""
    model, rows = adapted(tiny(torch.float32)), torch.tensor([PROMPTS[1]])
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with merged_adapters(model), torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        expected = model(rows).logits
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = model(rows).logits
        with merged_weights(causal_lm(model)), torch.no_grad():
            assert torch.equal(model(rows).logits, expected)
        assert torch.equal(model(rows).logits, plain)


def of_a_rank() -> PeftModel:
    model = adapted(tiny())
    ranks = object.__new__(Ranks)
    ranks.model = causal_lm(model)
    model.ranks = ranks
    return model


MERGED_BY_NONE = {  # by sampling neither
    r"embed_tokens: its weight is tied to another module's": tied,
    r"layers.1.self_attn.q_proj: its weight is a Tensor of float8_e4m3fn": quantised,
    r"layers.1.self_attn.v_proj: PEFT does not merge .*stays beside": unmergeable,
}
NOT_MERGED = {
    r"the weights of Qwen3ForCausalLM are in pieces on several processes": of_a_rank,
    r"Qwen3ForCausalLM has no active adapter of PEFT that is not merged yet": tiny,
    r"Qwen3ForCausalLM has no active adapter of PEFT": lambda: adapted(tiny()).merge_and_unload(),
}


@pytest.mark.parametrize("message", MERGED_BY_NONE | NOT_MERGED)
def test_what_cannot_be_merged_is_named_and_stays_as_it_is(message) -> None:
    model = (MERGED_BY_NONE | NOT_MERGED)[message]()
    notes = TransformersEngine(model, tokenizer()).notes if message in MERGED_BY_NONE else []
    before = bits(model)
    ranks = value_of(INSIDE, getattr(model, "ranks", None))
    refused = pytest.raises(CannotMerge, match=f"^merge_adapters=True: .*{message}.*; omit the option$")
    with ranks, refused, merged_weights(causal_lm(model)):
        pass
    if message in MERGED_BY_NONE:
        with pytest.raises(CannotMerge, match=message), merged_adapters(model):
            pass
        assert all(not layer.merged for layer in adapted_layers(model).values())
        assert re.search("^sampling with unmerged adapters, for .*" + message, notes[0])
    assert_same_bits(before, bits(model))
