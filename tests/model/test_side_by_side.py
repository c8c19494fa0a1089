"""Projections of one input are multiplied at once while decoding, by weights that stay the model's own."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, Qwen2Config

from tests.support.adapted import PROMPTS, SAMPLED, adapted, tiny, tokenizer
from trainer.rollouts import decoding
from trainer.rollouts.in_process import TransformersEngine

ROWS = [PROMPTS[1]] * 4
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def of(config) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def watched(model: nn.Module) -> nn.Module:
    """A copy whose linear layers have a hook each, which runs with them."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: None)
    return model


def captured(model: nn.Module) -> TransformersEngine:
    """An engine as on a GPU, whose steps would be graphs; `products` runs them each time."""
    return TransformersEngine(model, tokenizer(), captured=True)


@pytest.fixture
def products(monkeypatch):
    """Samples by an engine; gives the completions, and how many products of layers a token took."""
    tokens, counts, linear, one = [], [], nn.functional.linear, decoding.draw
    monkeypatch.setattr(decoding, "capture", lambda step, pool: (step, pool))
    monkeypatch.setattr(decoding, "draw", lambda *args: tokens.append(1) or one(*args))
    monkeypatch.setattr(nn.functional, "linear", lambda *args: counts.append(args[0].shape[1]) or linear(*args))

    def sample(engine):
        tokens.clear(), counts.clear()
        return engine(ROWS, **SAMPLED), counts.count(1) / len(tokens)

    return sample


def same(ours, theirs) -> None:
    assert ours.ids() == theirs.ids()
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-6)


MODELS = {
    "grouped heads": tiny,
    "biases": lambda: of(Qwen2Config(**SIZES)),
    "one module already": lambda: of(Phi3Config(**SIZES)),
    "LoRA": lambda: adapted(tiny()),
    "DoRA on some": lambda: adapted(tiny(), use_dora=True, target_modules=["q_proj", "up_proj"]),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_token_takes_four_products_a_layer_and_is_the_same(make, products) -> None:
    model = make()
    one_by_one = captured(watched(model))
    engine = captured(model)
    assert engine.notes == []
    stores = {store.data_ptr(): store.nbytes() for store in (p.untyped_storage() for p in model.parameters())}
    assert sum(stores.values()) == sum(p.nbytes for p in model.parameters()), "no more memory"
    for _ in range(2):
        (ours, few), (theirs, many) = products(engine), products(one_by_one)
        same(ours, theirs)
        assert (few, many) == (8, 8 if make is MODELS["one module already"] else 14)
        with torch.no_grad():
            for parameter in (*model.parameters(), *one_by_one._policy.parameters()):
                parameter.mul_(0.9)  # as an optimizer writes
    places = [p.data_ptr() for p in model.parameters()]
    captured(model)
    assert places == [p.data_ptr() for p in model.parameters()]


def test_weights_side_by_side_are_saved_as_others_are(tmp_path) -> None:
    model = tiny()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    captured(model)
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    assert read.keys() == before.keys()
    assert all(torch.equal(read[name], weight) for name, weight in before.items())
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size < 1.1 * sum(p.nbytes for p in model.parameters())


def test_what_is_not_side_by_side_is_named_and_multiplied_one_by_one(products, caplog) -> None:
    model = tiny()
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    expected, _ = products(captured(watched(model)))
    engine = captured(model)
    first = ", ".join(f"model.layers.0.self_attn.{one}_proj" for one in "qkv")
    (note,) = engine.notes
    assert note.startswith(f"decoding multiplies {first} one by one (2 groups): no plain linear layers")
    made = products(engine)
    same(made[0], expected)
    assert made[1] == 13  # of the first layer gate and up at once
    assert not caplog.messages
    gate = model.model.layers[0].mlp.gate_proj.weight
    gate.data = gate.data.clone()
    for _ in range(2):
        made = products(engine)
        same(made[0], expected)
        assert made[1] == 14
    said = [message for message in caplog.messages if message.startswith("decoding multiplies projections of Qwen3For")]
    assert len(said) == 1
