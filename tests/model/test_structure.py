"""A check of a model runs the first and the last layer of each kind, once."""

import copy
import logging

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from cfa_kernels.model.check import verify
from cfa_kernels.model.check.structure import kinds_of_layers, repeated_layers
from cfa_kernels.model.walk import ModelWalk
from tests.support.models import HYBRIDS, MASKED, MOE, OTHERS, make_model, small_model


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


def test_a_model_is_checked_once_and_a_copy_by_itself(caplog, attended):
    caplog.set_level(logging.INFO, logger=verify.__name__)
    model = deep().train()
    for checked, runs in ((model, True), (model, False), (copy.deepcopy(model), True)):
        verify.check_trainable(checked)
        assert bool(attended()) is runs
    assert "checking the model Qwen3ForCausalLM" in caplog.text


def test_layers_are_of_one_kind_by_shapes_numbers_and_code():
    def kinds(change):
        model = deep(4)
        change(model.model.layers[1])
        return [len(kind) for kind in kinds_of_layers(ModelWalk(model), model.model.layers)]

    assert kinds(lambda layer: None) == [4]
    for change in (
        lambda layer: setattr(layer.mlp, "forward", lambda x: x),
        lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
        lambda layer: setattr(layer.mlp, "up_proj", torch.nn.Linear(48, 160, bias=True)),
    ):
        assert kinds(change) == [3, 1]


DOZEN = {
    "Llama": {}, "Mistral": {"sliding_window": 9}, "Gemma2": {"head_dim": 16, "sliding_window": 9}, "Olmo2": {},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 9}, "Cohere": {"logit_scale": 0.25}, "Qwen3Moe": MOE,
    "GptOss": OTHERS["GptOss"], "DeepseekV3": OTHERS["DeepseekV3"], "Llama4Text": MASKED["Llama4Text"],
    "Qwen3_5Text": HYBRIDS["Qwen3_5Text"], "Bamba": HYBRIDS["Bamba"], "FalconH1": HYBRIDS["FalconH1"], "Bert": {},
    "Mamba": {}, "Bart": {}, "RecurrentGemma": {"head_dim": 16},
}  # fmt: skip


def refusal(model, few, monkeypatch):
    """Result of a check of few layers, or of all: the kind of refusal, or the head's numbers."""
    ModelWalk.of(model).checked.clear()
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
