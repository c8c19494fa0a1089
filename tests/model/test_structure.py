"""A check of a model runs the first and the last layer of each kind, and once for all models that are built alike."""

import copy
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from cfa_kernels.model.check import verify
from cfa_kernels.model.check.structure import model_structure, repeated_layers
from cfa_kernels.model.walk import ModelWalk
from tests.support.models import HYBRIDS, MASKED, MOE, OTHERS, make_model, small_model


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch):
    monkeypatch.setattr(verify, "_BY_STRUCTURE", {})


@pytest.fixture
def attended(monkeypatch):
    """Numbers of the layers whose attention ran since the last call of this function."""
    numbers: list[int] = []
    forward = Qwen3Attention.forward

    def counted(self, *args, **kwargs):
        numbers.append(self.layer_idx)
        return forward(self, *args, **kwargs)

    def since():
        recent = list(numbers)
        numbers.clear()
        return recent

    monkeypatch.setattr(Qwen3Attention, "forward", counted)
    return since


def deep(layers=8, **changes):
    return small_model(num_hidden_layers=layers, **changes)


def test_of_repeated_layers_the_first_and_the_last_run(attended):
    verify.check_trainable(deep().train())
    # Hidden states, own logits of all rows and of two by themselves, a tree; in training mode the same but for the two.
    assert attended() == [0, 7] * 8
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    mixed = deep(9, layer_types=types, sliding_window=9, use_sliding_window=True, max_window_layers=0)
    verify.check_supported(mixed)
    assert set(attended()) == {0, 2, 7, 8}
    mixed.model.layers[3].mlp.register_forward_hook(lambda *_: None)
    assert mixed.model.layers[3] not in repeated_layers(ModelWalk(mixed))


def test_a_model_of_equal_structure_costs_nothing_and_another_is_checked(caplog, attended):
    caplog.set_level(logging.INFO, logger=verify.__name__)
    model = deep().train()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    verify.check_trainable(model)
    assert attended()
    assert "checking the model Qwen3ForCausalLM" in caplog.text
    for equal in (model, other, deep().train()):
        verify.check_trainable(equal)
        assert not attended()
    adapter = get_peft_model(deep(), LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    for changed in (deep(7), deep().bfloat16(), deep(rms_norm_eps=1e-3), adapter):
        verify.check_trainable(changed)
        assert attended()


def test_code_of_a_single_model_is_like_no_other():
    model = deep()
    structure = model_structure(ModelWalk(model))
    assert structure == model_structure(ModelWalk(deep()))
    own = model.model.layers[3].mlp.forward
    model.model.layers[3].mlp.forward = lambda x: own(x)
    assert model_structure(ModelWalk(model)) != model_structure(ModelWalk(model))


DOZEN = {
    "Llama": {}, "Mistral": {"sliding_window": 9}, "Gemma2": {"head_dim": 16, "sliding_window": 9}, "Olmo2": {},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 9}, "Cohere": {"logit_scale": 0.25}, "Qwen3Moe": MOE,
    "GptOss": OTHERS["GptOss"], "DeepseekV3": OTHERS["DeepseekV3"], "Llama4Text": MASKED["Llama4Text"],
    "Qwen3_5Text": HYBRIDS["Qwen3_5Text"], "Bamba": HYBRIDS["Bamba"], "FalconH1": HYBRIDS["FalconH1"], "Bert": {},
    "Mamba": {}, "Bart": {}, "RecurrentGemma": {"head_dim": 16},
}  # fmt: skip


def refusal(model, few, monkeypatch):
    """Result of a check of few layers, or of all: the kind of refusal, or the head's numbers."""
    monkeypatch.setattr(verify, "_BY_STRUCTURE", {})
    verify._BY_MODEL.clear()
    repeated = repeated_layers(ModelWalk(model)) if few else {}
    with monkeypatch.context() as patch:
        patch.setattr(verify, "_on_few_layers", lambda walk, check: check(repeated))
        try:
            head = verify.check_supported(model)
        except NotImplementedError as error:
            return str(error).partition("(")[0]
    return head.softcap, head.logit_scale


@pytest.mark.parametrize("name", DOZEN)
def test_few_layers_get_the_verdict_of_the_whole(name, monkeypatch):
    model = make_model(name, **DOZEN[name] | {"num_hidden_layers": 6})
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    assert refusal(model, True, monkeypatch) == refusal(model, False, monkeypatch)
