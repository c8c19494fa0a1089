"""Liger's fused layers go into the trainer's model on a GPU; its losses do not."""

import subprocess
import sys
from pathlib import Path

# In a process of its own: Liger replaces functions inside transformers for good.
PROGRAM = """
from tests.tiny import tiny_model
from trainer.checkpoints import fuse_layers

model = tiny_model()
forward = type(model).forward
fuse_layers(model)
layer = model.model.layers[0]
for module in (layer.input_layernorm, layer.self_attn.q_norm, layer.mlp, model.model.norm):
    assert "liger" in module.forward.__func__.__module__, module
assert type(model).forward is forward
assert model.forward.__func__ is forward
"""


def test_fused_layers_replace_norms_and_mlps_but_not_the_loss() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=Path(__file__).resolve().parents[2])
