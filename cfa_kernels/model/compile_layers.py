"""Switch the compilation of a model's decoder layers on, once it has been shown to compute what they compute."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from .check.probe_mode import layers_skipped
from .check.structure import kinds_of_layers, repeated_layers
from .check.verify import ProbeTree, check_trainable
from .compiled import EAGER, CompiledKind, difference, inside_checkpoints
from .modes import one_mode, value_of
from .parts import backbone, causal_lm, input_device
from .run_inside import is_sharded
from .tree_forward import packed_hidden, tree_training_mode
from .walk import ModelWalk

_LOG = logging.getLogger(__name__)


def compile_layers(model: nn.Module, *, backend: Any = "inductor") -> list[str]:
    """Compile a model's decoder layers, for packed forwards, their backward, and steps that decode; call it once.

    A model that `fully_shard` cuts into pieces is compiled before that, while each process still has it whole.

    The model is checked as by `check_model`, then a small tree runs through its layers both ways. A kind of layer that
    does not compile, or not to the same results, runs as it is; the log names it and the reason once. So does a layer
    with hooks inside. Modules that run Liger's kernels run their class's own forward where compiled. Apply Liger with
    `rope=False`: its rotary embeddings replace a function of transformers', which is not restored. Adapters of frozen
    weights run as further columns of copies of these, if an eighth of a GPU's free memory holds the copies.

    Returns the names of the kinds of layers that run compiled, by the `backend` of `torch.compile`. Raises
    `NotImplementedError` for a model on a CPU or in pieces on several processes, one that keeps no list of `layers`,
    and what `check_model` raises.
    """
    causal = causal_lm(model)
    name, device = type(causal).__name__, input_device(causal)
    layers: Any = getattr(backbone(causal), "layers", None)
    has_layers = isinstance(layers, nn.ModuleList) and all(hasattr(layer, "self_attn") for layer in layers)
    for obstacle, is_there in {
        "on a CPU its attention is not a single operator; do not compile there":
            device.type == "cpu" and backend in ("inductor", "eager"),
        "its weights are in pieces on several processes; call compile_layers before fully_shard": is_sharded(model),
        "it has no list `layers` of modules with a `self_attn`": not has_layers,
    }.items():  # fmt: skip
        if is_there:
            raise NotImplementedError(f"model: the layers of {name} cannot be compiled: {obstacle}")
    walk, kinds = ModelWalk.of(causal), list[CompiledKind]()
    with one_mode(walk, training=True):
        check_trainable(walk)
        probe = ProbeTree.of(causal)
        with value_of(EAGER, True):
            expected = _results(walk, probe, layers)
        kinds = [CompiledKind(group, backend) for group in kinds_of_layers(walk, inside_checkpoints(layers))]
        results = _results(walk, probe, layers)
    apart = [difference("a small tree's results", *both, causal.dtype) for both in zip(expected, results, strict=True)]
    for kind in kinds if any(apart) else []:
        kind.stop(max(apart))
    return [kind.name for kind in kinds if kind.obstacle is None]


def _results(walk: ModelWalk, probe: ProbeTree, layers: nn.ModuleList) -> list[Tensor]:
    """Compute the hidden states of a probe, and the gradient of weights in the first and the last layer, as one."""
    ends = [p for layer in (layers[0], layers[-1]) for p in layer.parameters() if p.requires_grad]
    # Layers in between hand on their input, as rounding grows from layer to layer.
    with tree_training_mode(walk), layers_skipped(repeated_layers(walk)), torch.set_grad_enabled(bool(ends)):
        hidden = packed_hidden(walk, probe.pack).float()
        direction = torch.arange(hidden.numel(), device=hidden.device).cos().view_as(hidden)
        gradients = torch.autograd.grad((hidden * direction).mean(), ends, allow_unused=True) if ends else ()
    parts = [hidden.detach(), *(gradient for gradient in gradients if gradient is not None)]
    return [parts[0], torch.cat([part.float().flatten() for part in parts[1:] or parts])]
