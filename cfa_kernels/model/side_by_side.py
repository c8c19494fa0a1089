"""Multiply by the weights of projections that read one input at once, while completions are decoded.

The weights are moved side by side in memory, once, which takes no more of it: one matrix holds them all, and what an
optimizer or a merged adapter writes to a weight, it writes to rows of the matrix.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .lora import ONE_INPUT, is_watched, run_member
from .modes import exchanged
from .walk import ModelWalk

_LOG = logging.getLogger(__name__)
_ALIGNED = 16  # bytes of which the parts of a matrix are a multiple, as kernels want a matrix to begin


class Projections:
    """Projections of a model that read one input, by the names that they have in transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Move the weights of each group side by side; the others keep their place and are multiplied one by one."""
        self.apart: str | None = None  # the first group of these, and why
        self._groups, self._moved = list[_Group](), False
        walk, named = ModelWalk.of(model), dict[Any, dict[str, nn.Module]]()
        for name, module in walk.modules.items():
            parent, _, own = name.rpartition(".")
            if own in ONE_INPUT:
                named.setdefault((parent, ONE_INPUT[own]), {})[name] = module
        owners = Counter(map(id, walk.parameters()))
        for members in (group for group in named.values() if len(group) > 1):
            group = _Group([*members.values()])
            if (obstacle := group.obstacle(owners)) is None:
                group.join()
                self._groups.append(group)
            else:
                self.apart = self.apart or f"{', '.join(members)}: {obstacle}"

    def together(self) -> AbstractContextManager[None]:
        """Multiply by each group's weights at once inside, where they are still side by side and adapters merged."""
        some = [group for group in self._groups if group.is_plain()]
        joined = [group for group in some if group.lies_side_by_side()]
        if len(joined) < len(some) and not self._moved:
            self._moved = True
            _LOG.warning("%d groups of projections are multiplied one by one: weights moved", len(some) - len(joined))
        return exchanged(member for group in joined for member in group.members())


class _Group:
    """Projections of one input: the first that is called runs all, whose results await the other calls."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers  # of PEFT or plain
        self._ahead: list[tuple[Tensor, Tensor] | None] = [None] * len(layers)  # their input, and results that await it
        self._bases = [layer._modules.get("base_layer", layer) for layer in layers]

    def obstacle(self, owners: Counter[int]) -> str | None:
        """Say why their weights cannot be moved side by side; None if they can."""
        if any(type(base) is not nn.Linear or is_watched(base) for base in self._bases):
            return "not plain linear layers"
        forms = {(w.dtype, w.device, w.shape[1], base.bias is None) for base in self._bases for w in [base.weight]}
        tensors = [tensor for parts in self._parts() for tensor in parts]
        if len(forms) > 1 or any(type(x.data) is not Tensor or owners[id(x)] > 1 for x in tensors):
            return "not weights of one kind that nothing else has"
        return "sizes that are not aligned" if any(x.nbytes % _ALIGNED for x in tensors) else None

    def _parts(self) -> list[list[Any]]:
        columns = [[base._parameters[name] for base in self._bases] for name in ("weight", "bias")]
        return [column for column in columns if column[0] is not None]

    def join(self) -> None:
        """Move weights and biases side by side, unless they are."""
        for parts in [] if self.lies_side_by_side() else self._parts():
            whole = torch.cat([part.data for part in parts])
            for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = rows

    def is_plain(self) -> bool:
        """Whether every projection is now its linear layer."""
        pairs = zip(self._layers, self._bases, strict=True)
        return all(layer is base or layer.merged for layer, base in pairs)

    def lies_side_by_side(self) -> bool:
        """Whether their weights, and biases, follow each other in memory."""
        for parts in self._parts():
            end = parts[0].data_ptr()
            for part in parts:
                if type(part.data) is not Tensor or not part.is_contiguous() or part.data_ptr() != end:
                    return False
                end += part.nbytes
            if parts[0].untyped_storage().data_ptr() != parts[-1].untyped_storage().data_ptr():
                return False
        return True

    def members(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        """Yield the projections with the attributes by which they run together."""
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
            waiting, self._ahead[:] = (x, outs[place]), [(x, out) for out in outs]
            self._ahead[place] = None
        return waiting[1]
