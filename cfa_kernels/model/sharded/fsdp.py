"""Recognise torch's two kinds of FSDP and DeepSpeed's ZeRO-3, and read and set their inner states.

README.md lists the private names that are set; none of the packages is imported unless the model is of theirs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modes import attributes_set


def _instance_of(package: str, name: str) -> Callable[[object], bool]:
    def is_instance(thing: object) -> bool:
        kind = getattr(sys.modules.get(package), name, None)
        return kind is not None and isinstance(thing, kind)

    return is_instance


is_fsdp1 = _instance_of("torch.distributed.fsdp", "FullyShardedDataParallel")
is_fsdp2 = _instance_of("torch.distributed.fsdp", "FSDPModule")  # `fully_shard` was called on it
is_engine = _instance_of("deepspeed", "DeepSpeedEngine")  # of any stage
is_dtensor = _instance_of("torch.distributed.tensor", "DTensor")


def is_zero3(module: Any) -> bool:
    """Whether `module` is an engine of DeepSpeed that shards weights."""
    return is_engine(module) and module.zero_optimization_stage() == 3


def is_piece(weight: Tensor) -> bool:
    """Whether this process holds only a piece of a weight, by FSDP2, ZeRO-3 or tensor parallelism."""
    if is_zero3_weight(weight):
        return weight.ds_status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined, no-any-return]
    return is_dtensor(weight)


def holds_pieces(module: nn.Module) -> bool:
    """Whether a weight of `module` is a piece now."""
    return any(map(is_piece, module.parameters()))


def is_zero3_weight(tensor: Tensor | None) -> bool:
    """Whether ZeRO-3 keeps a weight in pieces outside the forwards that read it."""
    return hasattr(tensor, "ds_id")


_OURS = -1  # no module of DeepSpeed's has this number


@torch.no_grad()
def gather_zero3(modules: Iterable[nn.Module], undo: ExitStack) -> None:
    """Gather the weights of modules that ZeRO-3 has in pieces, all processes together, until `undo` closes."""
    parameters = (weight for module in modules for weight in module._parameters.values())
    weights: list[Any] = [weight for weight in parameters if is_zero3_weight(weight)]
    before = [set(weight.ds_active_sub_modules) for weight in weights]  # modules for which DeepSpeed keeps it whole
    away = [weight for weight in weights if weight.ds_status.name == "NOT_AVAILABLE"]

    @torch.no_grad()
    def give_back() -> None:
        for weight, users in zip(weights, before, strict=True):
            weight.ds_active_sub_modules.clear()
            weight.ds_active_sub_modules.update(users)
        for weight in away:
            if not weight.ds_active_sub_modules and weight.ds_status.name == "AVAILABLE":
                weight.partition()

    if not weights:
        return
    undo.callback(give_back)
    if away:  # `all_gather` of several waits for the last only, and gloo may end that first
        away[0].all_gather_coalesced(away).wait()
    for weight in weights:
        weight.ds_active_sub_modules.add(_OURS)


def sharding_group(root: Any) -> Any:
    """Return the process group that shares the weights of `root`; a mesh must be 1-dimensional or the whole world."""
    if is_fsdp1(root):
        return root.process_group
    if not is_fsdp2(root):
        return root.data_parallel_group
    mesh = next(parameter.device_mesh for parameter in root.parameters() if hasattr(parameter, "device_mesh"))
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == torch.distributed.get_world_size():  # HSDP: replicas run every layer as often
        return torch.distributed.group.WORLD
    raise NotImplementedError(f"model: is sharded over a mesh of {mesh.ndim} dimensions that is not the whole world")


def give_back(root: Any) -> None:
    """Drop the weights that a call without backward leaves whole: the next call would not gather them again."""
    if not is_fsdp2(root):
        return
    since_torch_2_13 = hasattr(root, "reset_iter_state")
    for module in filter(is_fsdp2, root.modules()):
        if not since_torch_2_13:  # a unit of several modules, not all of which have run, would stay as it is
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            state._modules_to_run_forward.clear()
            for part in (state, *_groups_of(state)):
                part._training_state = type(part._training_state).IDLE
        module.reshard()  # type: ignore[operator]
    if since_torch_2_13:
        root.reset_iter_state()  # type: ignore[operator]


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def prepare_zero3(root: Any, causal: PreTrainedModel) -> None:
    """Prepare ZeRO-3, before a call of `root`, for a body that runs layers as often as it likes."""
    if is_zero3(root):
        sys.modules["deepspeed"].zero.register_external_parameter(causal, causal.get_output_embeddings().weight)
        # By the order of earlier reads it would gather weights ahead, and if a layer fails each process has its own.
        order = getattr(root.optimizer, "parameter_offload", root.optimizer).get_param_coordinator()
        if not order.is_invalid_trace():
            order._invalidate_trace()


@contextmanager
def head_whole(root: Any, causal: PreTrainedModel) -> Iterator[None]:
    """Keep the head's weight whole inside a call of `root`: it is read outside the head's own call."""
    unit = _unit_of_head(root, causal) if is_fsdp2(root) else None
    if unit is None:
        yield
        return
    groups = _groups_of(unit._get_fsdp_state())
    with attributes_set((group, "post_forward_mesh_info", group.post_forward_mesh_info) for group in groups):
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
        yield


def _unit_of_head(root: nn.Module, causal: PreTrainedModel) -> Any:
    """Find the innermost unit of FSDP2 that holds the head; None if `root` itself holds it."""
    head = causal.get_output_embeddings()
    parts = next(name for name, module in root.named_modules() if module is head).split(".")
    above = [root.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts))]
    units = [module for module in [*above, *head.modules()] if is_fsdp2(module)]
    return units[-1] if units else None


def without_casts(root: nn.Module) -> AbstractContextManager[None]:
    """Leave the inputs of units as they are, which mixed precision would cast."""

    def changes() -> Iterator[tuple[Any, str, Any]]:
        for module in root.modules():
            if is_fsdp2(module):
                state: Any = module._get_fsdp_state()  # type: ignore[operator]
                yield state, "_mp_policy", replace(state._mp_policy, cast_forward_inputs=False, output_dtype=None)
            elif is_fsdp1(module):
                precision: Any = module.mixed_precision
                casts = {"cast_forward_inputs": False, "cast_root_forward_inputs": False}
                yield module, "mixed_precision", replace(precision, **casts)

    return attributes_set(changes())
