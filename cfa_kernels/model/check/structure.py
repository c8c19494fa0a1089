"""Describe modules apart from the values of their weights: equal descriptions compute the same."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from ..parts import foreign_hooks
from ..walk import ModelWalk, own_forward

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
_PLACE = re.compile("^(training|(layer|block)_?(idx|id|index|number)|idx)$")  # differ between equal layers


def model_structure(walk: ModelWalk) -> tuple:
    """Describe a model: its modules, their numbers, shapes, dtypes and code, and its configurations."""
    configs = [{**config.to_dict(), "_name_or_path": None} for config in walk.configs]
    return *map(repr, configs), *_described(walk.modules.items())


def repeated_layers(walk: ModelWalk) -> dict[nn.Module, nn.Module]:
    """Find the layers that lie between the first and the last one of their kind; each with the first."""
    repeated: dict[nn.Module, nn.Module] = {}
    for layers in _lists_of_layers(walk.model):
        for first, *between in kinds_of_layers(walk, layers):
            repeated |= dict.fromkeys(between[:-1], first)
    return repeated


def kinds_of_layers(walk: ModelWalk, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group the layers of a list by what they compute, apart from the values of their weights."""
    kinds: dict[tuple, list[nn.Module]] = defaultdict(list)
    for i, layer in enumerate(layers):
        entries = (x[i] for config in walk.configs for x in _lists_of(config, len(layers)))
        kinds[*map(repr, entries), *_described(layer.named_modules())].append(layer)
    return list(kinds.values())


def _lists_of_layers(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _lists_of_layers(child)
        elif len(set(child)) == len(child) and all(layer._modules for layer in child):
            yield child


def _lists_of(config: Any, length: int) -> Iterator[list | tuple]:
    for owner in {id(each): each for each in (config, config.get_text_config())}.values():
        yield from (x for x in vars(owner).values() if isinstance(x, (list, tuple)) and len(x) == length)


def _described(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple]:
    for name, module in modules:
        forward = own_forward(module)
        yield (
            name,
            type(module),
            type(module).forward,
            forward and _code(forward, module),
            *(_code(hook, module) for hook in foreign_hooks(module)),
            *(
                (key, repr(value) if _is_plain(value) else _code(value, module))
                for key, value in vars(module).items()
                if key[0] != "_" and key != "forward" and not _PLACE.search(key)
                if _is_plain(value) or isinstance(value, _FUNCTIONS)
            ),
            *((key, *_tensor(value)) for key, value in module._parameters.items() if value is not None),
            *((key, *_tensor(value), _total(value)) for key, value in module._buffers.items() if value is not None),
        )


def _tensor(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad


def _total(buffer: torch.Tensor) -> float:
    return 0.0 if buffer.is_meta else buffer.double().sum().item()


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bool, int, float, str, NoneType, torch.dtype))


def _code(function: Any, module: nn.Module) -> object:
    """Return the function if other modules may have it too, else an object that equals nothing."""
    inner = getattr(function, "__func__", function)
    bound_elsewhere = isinstance(function, MethodType) and function.__self__ is not module
    private = bound_elsewhere or not isinstance(inner, _FUNCTIONS) or getattr(inner, "__closure__", None)
    return object() if private else inner
