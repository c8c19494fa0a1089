"""Merging adapters for sampling: the same completions, and the same bits of the weights afterwards."""

import copy
import re

import pytest
import torch
from peft import PeftModel
from torch import nn

from cfa_kernels.model.merged import CannotMerge, adapted_layers, merged_adapters
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.state import ModelState
from tests.support.adapted import PROMPTS, SAMPLED, adapted, tiny, tokenizer
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
        assert torch.equal(values, after[name][0]), name
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
    state, before = ModelState(causal_lm(model)), bits(model)
    engine, apart = TransformersEngine(model, tokenizer()), TransformersEngine(model, tokenizer())
    apart._merges = False
    beside, merged = apart(PROMPTS, **SAMPLED), engine(PROMPTS, **SAMPLED)
    assert engine.notes == []
    assert beside.ids() == merged.ids()
    torch.testing.assert_close(beside.logprobs, merged.logprobs, rtol=1e-6, atol=1e-6)
    with merged_adapters(model):  # a CUDA graph reads them where they were
        assert all(weight.data_ptr() == before[name][1] for name, weight in model.named_parameters())
    assert_same_bits(before, bits(model))
    assert state.change(causal_lm(model)) is None
    assert adapted_layers(model)


def test_a_merge_in_bfloat16_leaves_the_same_bits_even_after_an_error() -> None:
    model = adapted(tiny(torch.bfloat16))
    state, before = ModelState(causal_lm(model)), bits(model)

    def fail_inside() -> None:
        with merged_adapters(model) as layers:
            assert layers == 14
            assert "merged" in state.change(causal_lm(model))
            changed = {name for name, (values, *_) in bits(model).items() if not torch.equal(values, before[name][0])}
            assert changed == {name for name in before if name.endswith("base_layer.weight")}
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert_same_bits(before, bits(model))
    assert state.change(causal_lm(model)) is None


def test_a_forward_before_sampling_goes_backward_after_it() -> None:
    model = adapted(tiny())
    ids = torch.tensor([PROMPTS[1]])

    def gradients(between) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        between()
        loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    engine = TransformersEngine(model, tokenizer())
    expected = copy.deepcopy(gradients(lambda: None))
    torch.testing.assert_close(gradients(lambda: engine(PROMPTS, **SAMPLED)), expected, rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tied, r"embed_tokens: its weight is tied to another module's"),
        (quantised, r"layers.1.self_attn.q_proj: its weight is a Tensor of float8_e4m3fn"),
        (unmergeable, r"layers.1.self_attn.v_proj: PEFT does not merge .*stays beside"),
    ],
)
def test_what_cannot_be_merged_is_named_and_stays_as_it_is(make, message) -> None:
    model = make()
    before = bits(model)
    with pytest.raises(CannotMerge, match=message), merged_adapters(model):
        pass
    assert_same_bits(before, bits(model))
    assert all(not layer.merged for layer in adapted_layers(model).values())
    (note,) = TransformersEngine(model, tokenizer()).notes
    assert re.search("^sampling with unmerged adapters, for .*" + message, note)
