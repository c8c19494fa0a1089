"""LoRA layers run as one op compute what PEFT's own do, on a CPU and as on a GPU, and leave no trace."""

import pytest
import torch
from peft import LoraConfig
from torch import nn

from cfa_kernels import packed_logprobs
from cfa_kernels.model import lora
from cfa_kernels.model.lora import one_pass_adapters
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.ops.adapted_linear import adapted_linear, split_adapters
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_forward
from tests.support.as_on_gpu import DEVICE
from tests.support.models import (
    PLACEHOLDER,
    SMALL_ROWS,
    SMALL_SPANS,
    assert_same_gradients,
    gradients,
    score_forward,
    small_adapted,
    tokens,
)  # fmt: skip


def adapted(**config):
    return small_adapted(**config).cpu()


def layer_of(model):
    return causal_lm(model).model.layers[0].mlp.down_proj


def calls(monkeypatch):
    """How often the op runs from now on."""
    made: list[int] = []
    monkeypatch.setattr(lora, "adapted_linear", lambda *args: made.append(1) or adapted_linear(*args))
    return made


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_gradients_of_packed_logprobs_are_those_of_pefts_own_layers(checkpointing, monkeypatch, unchecked):
    made = calls(monkeypatch)

    def gradients_of(model):
        return gradients(model, sum(row.square().sum() for row in packed_logprobs(model, Rows(*SMALL_ROWS))))

    own, model = adapted(), adapted()
    for module in own.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: None)  # so that PEFT calls it
    expected = gradients_of(own)
    assert not made
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    ours = gradients_of(model)
    assert len(made) == (4 if checkpointing else 2)
    assert_same_gradients(ours, expected, 1e-5)


def in_halves(**config):
    """An adapted model as PEFT loads it on a GPU: bfloat16 weights, float32 adapters."""
    model = adapted(**config)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    return model.to(DEVICE)


@pytest.fixture
def log_probs_by_peft(monkeypatch, unchecked):
    """Log-probs and the adapters' gradients of a model whose layers PEFT runs, or which run as one op."""

    def run(model, own):
        with monkeypatch.context() as patch:
            if own:
                patch.setattr(lora, "_lora_layers", lambda walk: [])
            rows = packed_logprobs(model, Rows(tokens(*[5] * 8), tokens(*[40] * 8, seed=1)))
        sum(row.sum() for row in rows).backward()
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        return torch.cat(rows).detach(), torch.cat([parameter.grad.flatten() for parameter in trained])

    return run


@pytest.mark.parametrize("config", [{"use_rslora": True}, {"target_modules": "all-linear"}])
def test_float32_adapters_on_halves_are_as_close_to_the_truth_as_peft_on_a_gpu(config, monkeypatch, log_probs_by_peft):
    made = calls(monkeypatch)
    ours, by_ours = log_probs_by_peft(in_halves(**config), own=False)
    assert len(made) == (4 if config.get("target_modules") else 2)
    theirs, by_theirs = log_probs_by_peft(in_halves(**config), own=True)
    assert len(made) == (4 if config.get("target_modules") else 2)
    wide = in_halves(**config).float()
    truth, by_truth = log_probs_by_peft(wide, own=True)
    assert (ours - truth).norm() <= 1.5 * (theirs - truth).norm()
    assert (by_ours - by_truth).norm() <= 1.5 * (by_theirs - by_truth).norm()
    assert by_ours.dtype == torch.float32


def take_a_step(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    sum(row.sum() for row in packed_logprobs(model, Rows(*SMALL_ROWS))).backward()
    return optimizer.step


def write_in_place(model):
    with torch.no_grad():
        layer_of(model).lora_B["default"].weight.mul_(2)


def load(model):
    model.load_state_dict(
        {name: 2 * tensor if "lora_A" in name else tensor for name, tensor in model.state_dict().items()}
    )


WRITES = {
    "nothing": (lambda model: None, 0),
    "an optimizer step": (lambda model: take_a_step(model)(), 8),
    "a write in place": (write_in_place, 8),
    "a loaded state": (load, 8),
    "another scale": (lambda model: layer_of(model).scale_layer(2.0), 8),
    "an exchanged weight": (
        lambda model: setattr(layer_of(model).lora_B["default"], "weight", nn.Parameter(torch.ones(32, 2))), 8
    ),
}  # fmt: skip


@pytest.mark.traced
@pytest.mark.parametrize("write", WRITES)
def test_parts_of_adapters_are_split_once_while_their_weights_stand(write, monkeypatch, unchecked):
    split, (change, anew) = [], WRITES[write]
    monkeypatch.setattr(lora, "is_on_gpu", lambda _: True)  # also where layers run again, in the backward
    monkeypatch.setattr(
        lora, "split_adapters", lambda groups, *others: split.extend(groups) or split_adapters(groups, *others)
    )
    model = in_halves(layers=2, target_modules="all-linear")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def step():
        forward = packed_forward(causal_lm(model), Rows(*SMALL_ROWS), keep_states=True)
        drops = score_forward(forward, *SMALL_SPANS, mask=PLACEHOLDER).base
        return sum(row.square().sum() for row in forward.logprobs()), drops

    loss, before = step()
    loss.backward()
    assert len(split) == 8  # queries, keys and values; their output; gate and its input; the MLP's output
    change(model)
    split.clear()
    step()[0].backward()
    after = step()[1]
    assert len(split) == anew
    causal_lm(model)._cfa_walk = None
    assert torch.equal(after.nan_to_num(), step()[1].nan_to_num())
    assert torch.equal(after.nan_to_num(), before.nan_to_num()) == (write == "nothing")


def test_layers_run_together_only_where_they_are_called_with_the_same_rows(monkeypatch):
    """Each with its own result, whatever is called between, and also by another kind of adapter."""
    model, made = adapted(target_modules="all-linear", rank_pattern={"v_proj": 4}), calls(monkeypatch)
    attention, x = causal_lm(model).model.layers[0].self_attn, torch.randn(1, 3, 32)
    other = x.clone()
    query, key, value = (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
    expected = [query(x), key(other), value(x), key(x), query(x)]
    with one_pass_adapters(ModelWalk.of(causal_lm(model))):
        results = [query(x), key(other), value(x)]
        assert len(made) == 3  # of queries and keys, of keys alone, of values
        results += [key(x), query(x)]
        assert len(made) == 4
    torch.testing.assert_close(results, expected)


def test_autocast_in_the_dtype_of_halves_changes_nothing_on_a_gpu(monkeypatch):
    model, made = in_halves(), calls(monkeypatch)
    x = torch.randn(1, 3, 48, dtype=torch.bfloat16).to(DEVICE)
    with one_pass_adapters(ModelWalk.of(causal_lm(model))):
        expected = layer_of(model)(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            assert torch.equal(layer_of(model)(x), expected)
        with torch.autocast(x.device.type, torch.float16):
            layer_of(model)(x)
    assert len(made) == 2


def two_adapters(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


CHANGES = {
    "merged": lambda model: model.merge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "two adapters": two_adapters,
    "halves on a CPU": lambda model: model.to(torch.bfloat16),
    "a hook": lambda model: layer_of(model).base_layer.register_forward_hook(lambda *_: None),
    "a backward hook": lambda model: layer_of(model).lora_A["default"].register_full_backward_hook(lambda *_: None),
    "a forward of its own": lambda model: setattr(layer_of(model), "forward", layer_of(model).forward),
}
STAYS = {
    "another scale": lambda model: layer_of(model).set_scale("default", 3.0),
    "another dtype": lambda model: model.double(),
}  # fmt: skip


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("change", CHANGES | STAYS)
def test_other_than_plain_adapters_run_as_peft_has_them(change, ran_before, monkeypatch):
    model, made = adapted(), calls(monkeypatch)
    if ran_before:
        with one_pass_adapters(ModelWalk.of(causal_lm(model))):
            layer_of(model)(torch.randn(1, 3, 48))
        assert made.pop()
    (CHANGES | STAYS)[change](model)
    layer = layer_of(model)
    x = torch.randn(1, 3, 48, dtype=next(model.parameters()).dtype)
    expected = layer(x)
    with one_pass_adapters(ModelWalk.of(causal_lm(model))):
        torch.testing.assert_close(
            layer(x), expected, rtol=0 if change in CHANGES else None, atol=0 if change in CHANGES else None
        )
    assert len(made) == (change in STAYS)


@pytest.mark.parametrize("make", [adapted, in_halves])
@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}], ids=str)
def test_variants_dropout_and_biases_of_adapters_run_as_peft_has_them(kind, make, monkeypatch):
    model, made = make(**kind), calls(monkeypatch)
    dtype = causal_lm(model).dtype
    with one_pass_adapters(ModelWalk.of(causal_lm(model))):
        layer_of(model)(torch.randn(1, 3, 48, dtype=dtype).to(DEVICE if make is in_halves else "cpu"))
    assert not made


def test_a_reference_without_the_adapter_may_come_between_a_checkpointed_forward_and_its_backward():
    gradients = []
    for asks_reference in (False, True):
        model = adapted().train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        loss = torch.cat(packed_logprobs(model, Rows(*SMALL_ROWS))).sum()
        if asks_reference:
            with model.disable_adapter(), torch.no_grad():
                packed_logprobs(model, Rows(*SMALL_ROWS))
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def in_compiled_layers(free, monkeypatch):
    """A model, and a function that lists its groups' wide weights as compiled layers on a GPU have them."""
    monkeypatch.setattr(lora, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(lora, "free_memory", lambda _: free)
    model = in_halves(r=8, target_modules=["down_proj"])

    def columns():
        walk = ModelWalk.of(causal_lm(model))
        with one_pass_adapters(walk, compiled=True):
            return [group.parts.wide for group in walk.kept["groups"].all]

    return model, columns


def test_copies_follow_weights_that_peft_has_merged_and_unmerged_after_a_step(monkeypatch):
    """As trainers do that hand merged weights to a sampler; rounding stays behind, and PyTorch counts no write."""
    model, columns = in_compiled_layers(1 << 40, monkeypatch)
    weight = layer_of(model).base_layer.weight
    old, _ = weight.clone(), columns()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sum(parameter.sum() for parameter in trained).backward()
    torch.optim.SGD(trained, lr=0.1).step()
    model.merge_adapter()
    model.unmerge_adapter()
    assert not torch.equal(weight, old)
    (wide,) = columns()
    assert torch.equal(wide.view(len(weight), -1)[:, : weight.shape[1]], weight)


@pytest.mark.parametrize("first", ["default", "all"])
def test_other_adapters_that_take_more_memory_are_weighed_anew(first, monkeypatch, caplog):
    model, columns = in_compiled_layers(8 * 32 * 48 * 2, monkeypatch)  # of one weight
    model.add_adapter("all", LoraConfig(r=8, target_modules=["gate_proj", "down_proj"], init_lora_weights=False))
    for name in (first, "all" if first == "default" else "default", first):
        model.set_adapter(name)
        assert [wide is not None for wide in columns()] == ([True] if name == "default" else [False, False])
    assert caplog.text.count("are multiplied one by one") == 1


def test_parts_of_a_group_that_was_none_of_halves_at_first_are_of_its_weights_now(monkeypatch):
    """As when oneDNN, which multiplies bfloat16 on a CPU, is switched on between two forwards."""
    fits, model, x = (
        [False],
        in_halves(r=8, target_modules=["down_proj"]),
        torch.ones(2, 48, dtype=torch.bfloat16).to(DEVICE),
    )
    monkeypatch.setattr(lora, "_halves_fit", lambda _: fits[0])
    walk, layer = ModelWalk.of(causal_lm(model)), layer_of(model)

    def result():
        with torch.no_grad(), one_pass_adapters(walk):
            return layer(x)

    result()
    fits[0] = True
    before = result()
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(3)
    after = result()
    assert not torch.equal(after, before)
    walk.kept.pop("groups")
    assert torch.equal(result(), after)
