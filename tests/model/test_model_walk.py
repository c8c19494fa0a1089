"""A model keeps one record of its modules until they change; what calls need to know of them comes from it."""

import copy
import weakref

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from cfa_kernels.model.parts import causal_lm
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.rows import Rows
from cfa_kernels.scoring.packed import packed_forward
from tests.support.models import (
    PLACEHOLDER,
    SMALL_ROWS,
    SMALL_SPANS,
    make_model,
    score_columns,
    score_forward,
    small_adapted,
)


@pytest.fixture(scope="module")
def adapted():
    return small_adapted(layers=2).cpu()


@pytest.fixture
def walks(monkeypatch):
    """The walks over a whole model from now on: our own, and those of torch and transformers, by whatever method."""
    taken, walk, own = [], nn.Module.named_modules, ModelWalk.__init__

    def counted(self, *args, **kwargs):
        if hasattr(self, "lm_head") and not args and not kwargs.get("prefix"):
            taken.append(type(self).__name__)
        return walk(self, *args, **kwargs)

    def counted_own(self, model):
        if hasattr(model, "lm_head"):
            taken.append("ours")
        own(self, model)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    monkeypatch.setattr(ModelWalk, "__init__", counted_own)
    return taken


def test_calls_share_the_walk_of_the_first(adapted, walks):
    causal = causal_lm(adapted)
    packed_forward(causal, Rows(*SMALL_ROWS), keep_states=True)  # verified
    walks.clear()
    forward = packed_forward(causal, Rows(*SMALL_ROWS), keep_states=True)
    score_forward(forward, *SMALL_SPANS, mask=PLACEHOLDER)
    score_columns(adapted, *SMALL_ROWS, *SMALL_SPANS, mask=PLACEHOLDER)
    assert not walks


def test_a_walk_meets_the_modules_that_torch_meets_in_its_order(adapted):
    adapted.shared = adapted.base_model.model.lm_head
    adapted.none = None
    adapted.register_module("missing", None)
    assert list(ModelWalk(adapted).modules.items()) == list(adapted.named_modules())
    del adapted.shared, adapted.none, adapted.missing


CHANGES = {
    "a module replaced": lambda model: setattr(model.model.layers[0], "mlp", nn.Identity()),
    "a module wrapped": lambda model: get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])),
    "a module moved": lambda model: setattr(model.model.layers[0], "norm", model.model._modules.pop("norm")),
    "a forward overwritten": lambda model: setattr(model.model.norm, "forward", lambda x: x),
    "a class exchanged": lambda model: setattr(model.model.norm, "__class__", type("Norm", (nn.Module,), {})),
}


TENSORS = {
    "a weight exchanged": lambda model: setattr(model.model.norm, "weight", nn.Parameter(model.model.norm.weight.data)),
    "a buffer added": lambda model: model.model.norm.register_buffer("more", model.model.norm.weight.data),
    "the last module renamed": lambda model: setattr(model.model, "turn", model.model._modules.pop("rotary_emb")),
}


HOOKS = {
    "a hook on an inner module": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "a layer appended twice": lambda model: model.model.layers.append(model.model.layers[0]),
}


@pytest.mark.parametrize("change", CHANGES | TENSORS | HOOKS)
def test_a_model_keeps_its_record_until_it_changes(change, walks):
    model = make_model("Qwen3", num_hidden_layers=1)
    walks.clear()
    kept = ModelWalk.of(model)
    kept.checked["verdict"] = True
    assert ModelWalk.of(model) is kept
    assert walks == ["ours"]
    (CHANGES | TENSORS | HOOKS)[change](model)
    now = ModelWalk.of(model)
    assert now is not kept
    assert list(now.modules.items()) == list(model.named_modules())
    assert bool(now.checked) == (change in TENSORS and "module" not in change)


def test_a_copy_walks_by_itself_and_a_walk_keeps_no_weight_that_its_model_has_given_up():
    model = make_model("Qwen3", num_hidden_layers=1)
    walk, twin = ModelWalk.of(model), copy.deepcopy(model)
    assert ModelWalk.of(twin).model is twin
    given_up = weakref.ref(model.model.norm.weight)
    model.model.norm.weight = None
    assert given_up() is None
    assert not walk.holds()


def test_the_model_is_found_without_a_look_at_weights() -> None:
    """Under ZeRO-3 a look is a gathering, which hangs unless all processes look."""
    model = make_model("Qwen3", num_hidden_layers=1)
    refuse = property(lambda self: pytest.fail("the weight of the embedding was read"))
    model.get_input_embeddings().__class__ = type("Embedding", (nn.Embedding,), {"weight": refuse})
    assert causal_lm(model) is model
