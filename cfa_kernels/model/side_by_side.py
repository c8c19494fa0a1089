"""Multiply by the weights of projections that read one input at once, while completions are decoded.

The weights are moved side by side in memory, once, which takes no more of it: one matrix holds them all, and what an
optimizer or a merged adapter writes to a weight, it writes to rows of the matrix. `save_pretrained` and `torch.save`
keep all weights; accelerate's `save_model` takes those of one matrix for tied ones and leaves them out. On a CPU
weights stay where they are: one product of 64 rows takes as long as its parts.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .lora import ONE_INPUT, is_watched, run_member
from .modes import exchanged
from .walk import ModelWalk

_LOG = logging.getLogger(__name__)


class Projections:
    """Projections of a model that read one input, by the names that they have in transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Move weights of each group side by side, if they are of plain linear layers and nothing else has them."""
        walk, named = ModelWalk.of(model), defaultdict[Any, dict[str, nn.Module]](dict)
        for name, module in walk.modules.items():
            parent, _, own = name.rpartition(".")
            if own in ONE_INPUT:
                named[parent, ONE_INPUT[own]][name] = module
        why = "decoding multiplies projections of %s one by one, as their weights have moved; a new engine joins them"
        moved = cache(lambda: _LOG.warning(why, type(walk.model).__name__))  # said once
        owners, members = Counter(map(id, walk.parameters())), [each for each in named.values() if len(each) > 1]
        groups = [(_Group([*each.values()], moved), ", ".join(each)) for each in members]
        apart = [names for group, names in groups if not group.join(owners)]
        self._groups = [group for group, names in groups if names not in apart]
        torch.cuda.empty_cache()  # of the weights' former places
        reason = f"one by one ({len(apart)} groups): no plain linear layers of one type with weights of their own"
        self.notes = [f"decoding multiplies {names} {reason}" for names in apart[:1]]

    def together(self) -> AbstractContextManager[None]:
        """Multiply by each group's weights at once inside, if they are still side by side and all adapters merged."""
        return exchanged(member for group in self._groups for member in group.members())


class _Group:
    """Projections of one input: the first that is called runs all, whose results await the other calls."""

    def __init__(self, layers: list[Any], moved: Callable[[], None]) -> None:
        self._layers, self._moved = layers, moved  # of PEFT or plain; what says that weights have moved
        self._bases = [layer._modules.get("base_layer", layer) for layer in layers]
        self._wholes = list[Tensor]()
        self._ahead: list[tuple[Tensor, Tensor] | None] = [None] * len(layers)  # their input, and results that await it

    def _parts(self) -> list[list[Any]]:
        columns = [[getattr(base, name) for base in self._bases] for name in ("weight", "bias")]
        return [column for column in columns if column[0] is not None]

    def join(self, owners: Counter[int]) -> bool:
        """Move weights and biases side by side, unless they are; give whether they could be."""
        if any(type(base) is not nn.Linear for base in self._bases):
            return False
        forms = {(base.in_features, base.weight.dtype, base.weight.device, base.bias is None) for base in self._bases}
        each = [x for parts in self._parts() for x in parts]  # kernels want a matrix to begin at 16 bytes
        if len(forms) > 1 or any(type(x.data) is not Tensor or owners[id(x)] != 1 or x.nbytes % 16 for x in each):
            return False
        for parts in [] if self._lie_side_by_side() else self._parts():
            whole = torch.cat([part.data for part in parts])
            for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = rows
        return True

    def _lie_side_by_side(self) -> bool:
        for parts in self._parts():
            if any(type(x.data) is not Tensor or not x.numel() for x in parts):
                return False
            ends, stores = accumulate(x.nbytes for x in parts), {x.untyped_storage().data_ptr() for x in parts}
            if len(stores) > 1 or [x.data_ptr() - parts[0].data_ptr() + x.nbytes for x in parts] != [*ends]:
                return False
        return True

    def members(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """Yield the projections with the attributes by which they run together, none if they cannot."""
        self._wholes = []  # weights that have moved leave nothing behind
        merged = all(layer is base or layer.merged for layer, base in zip(self._layers, self._bases, strict=True))
        if not merged or any(map(is_watched, (*self._layers, *self._bases))):
            return
        if not self._lie_side_by_side():
            return self._moved()
        self._sizes = [len(base.weight) for base in self._bases]
        firsts = [parts[0].data for parts in self._parts()]
        # No views: a graph would depend on where in its storage a tensor begins.
        self._wholes = [x.as_strided((sum(self._sizes), *x.shape[1:]), x.stride()).data for x in firsts]
        for place, layer in enumerate(self._layers):
            yield layer, {"forward": MethodType(run_member, layer), "cfa_member": (self, place)}

    def run(self, layer: Any, place: int, x: Tensor) -> Tensor:
        """Give the result of the projection at a place."""
        waiting, self._ahead[place] = self._ahead[place], None
        if waiting is None or waiting[0] is not x:
            outs = nn.functional.linear(x, *self._wholes).split(self._sizes, -1)
            waiting, self._ahead[:] = (x, outs[place]), [(x, out) if i != place else None for i, out in enumerate(outs)]
        return waiting[1]
