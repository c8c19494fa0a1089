"""Find layers of one kind: equal but for the values of their weights."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch import nn

from ..walk import ModelWalk, is_hooked, own_forward

_PLACE = re.compile("^(training|(layer|block)_?(idx|id|index|number)|idx)$")  # differ between equal layers


def repeated_layers(walk: ModelWalk) -> dict[nn.Module, nn.Module]:
    """Find the layers that lie between the first and the last one of their kind; each with the first."""
    repeated: dict[nn.Module, nn.Module] = {}
    for layers in _lists_of_layers(walk.model):
        for first, *between in kinds_of_layers(walk, layers):
            repeated |= dict.fromkeys(between[:-1], first)
    return repeated


def kinds_of_layers(walk: ModelWalk, layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group the layers of a list by classes, shapes, numbers and their entries in lists of the configuration.

    A layer with hooks, or a `forward` of its own inside, is a kind by itself.
    """
    kinds: dict[tuple, list[nn.Module]] = defaultdict(list)
    owners = {id(each): each for config in walk.configs for each in (config, config.get_text_config())}.values()
    lists = [x for own in owners for x in vars(own).values() if isinstance(x, (list, tuple)) and len(x) == len(layers)]
    for i, layer in enumerate(layers):
        kinds[*(repr(x[i]) for x in lists), *_described(layer.named_modules())].append(layer)
    return list(kinds.values())


def _lists_of_layers(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _lists_of_layers(child)
        elif len(set(child)) == len(child) and all(layer._modules for layer in child):
            yield child


def _described(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple]:
    for name, module in modules:
        tensors = (*module._parameters.items(), *module._buffers.items())
        numbers = [(key, x) for key, x in vars(module).items() if key[0] != "_" and not _PLACE.search(key)]
        yield (
            name,
            type(module),
            object() if is_hooked(module) or own_forward(module) is not None else None,  # equals nothing else
            *((key, repr(x)) for key, x in numbers if _is_plain(x)),
            *((key, x.shape, x.dtype, x.device.type, x.requires_grad) for key, x in tensors if x is not None),
        )


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bool, int, float, str, NoneType, torch.dtype))
