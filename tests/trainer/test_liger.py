"""Liger's fused layers go into the trainer's model on a GPU; its losses do not."""

import pytest
from transformers.models.qwen3 import modeling_qwen3

from tests.tiny import tiny_model
from trainer.checkpoints import fuse_layers


@pytest.fixture
def restored_transformers():
    """Liger replaces functions inside transformers for good: put them back for other tests."""
    before = dict(vars(modeling_qwen3))
    yield
    vars(modeling_qwen3).update(before)


@pytest.mark.usefixtures("restored_transformers")
def test_fused_layers_replace_norms_and_mlps_but_not_the_loss() -> None:
    model = tiny_model()
    forward = type(model).forward
    fuse_layers(model)
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.self_attn.q_norm, layer.mlp, model.model.norm):
        assert "liger" in module.forward.__func__.__module__, module
    assert type(model).forward is forward
    assert model.forward.__func__ is forward
