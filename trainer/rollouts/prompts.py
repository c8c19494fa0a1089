"""Feed prompts to a model for their keys and values, and keep those once that several rows of a batch begin with."""

import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cfa_kernels.model.compiled import EAGER
from cfa_kernels.model.decode_attention import SharedKeys, cache_argument
from cfa_kernels.model.limits import largest_forward
from cfa_kernels.model.modes import value_of
from cfa_kernels.model.tree_forward import packed_hidden, tree_attention_mode
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.ops.upload import upload
from cfa_kernels.tree.packs import pack_of
from cfa_kernels.tree.prefix_tree import PrefixTree

_say_once = functools.cache(logging.getLogger(__name__).warning)
_WHOLE = "prompts are fed whole, although all begin alike: %s scales queries by their place among more than %d rows"
SHARED_FROM = 256  # tokens; a shorter beginning costs about as much apart as it does once
KeysValues = tuple[Tensor, Tensor]  # (B, Hkv, W, D), (B, Hkv, W, Dv)


def common_beginning(ids: Tensor, mask: Tensor) -> int:
    """Count the tokens that all prompts (B, W), padded on the left, begin with."""
    shortest, start = int(mask.sum(1).min()), mask.shape[1] - mask.sum(1, keepdim=True)
    first = ids.gather(1, start + torch.arange(shortest))
    return int((first == first[:1]).all(0).cumprod(0).sum())


def feed(model: PreTrainedModel, ids: Tensor, mask: Tensor, beginning: int) -> list[KeysValues]:
    """Compute each layer's keys and values of prompts (B, W) on the host, padded on the left: whole, or a window's end.

    The forward is one over the padded batch, or over their prefix tree if the `beginning` that all share is long
    and the model takes so many rows at once.
    """
    device = next(model.parameters()).device
    if beginning >= SHARED_FROM and model._can_set_attn_implementation():
        tree, cache = PrefixTree(), DynamicCache()  # without windows, for all rows
        paths = [tree.insert(row[own]) for row, own in zip(ids.numpy(), mask.numpy().astype(bool), strict=True)]
        index = np.stack([np.pad(path, (ids.shape[1] - len(path), 0)) for path in paths])
        most = largest_forward(walk := ModelWalk.of(model))
        if most is None or tree.num_tokens <= most:
            with value_of(EAGER, True), tree_attention_mode(walk):
                packed_hidden(walk, pack_of(tree), cache=cache)
            (rows,) = upload([index.astype(np.int64)], device)
            return [tuple(part[0][:, rows].transpose(0, 1) for part in pair) for pair in _pairs(cache)]  # type: ignore[misc]
        _say_once(_WHOLE, type(model).__name__, most)
    cache = DynamicCache(config=model.config)
    ids, mask = upload([ids, mask], device)
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), cache_argument(model): cache}
    model.get_decoder()(input_ids=ids, use_cache=True, **options)
    return _pairs(cache)


def _pairs(cache: Any) -> list[KeysValues]:
    return [(layer.keys, layer.values) for layer in cache.layers]


class Sharing(NamedTuple):
    """What rows of a batch begin with together: whole prompts by groups, or the beginning of all as one group."""

    groups: int
    members: int  # rows of the largest group
    start: int  # place in the groups' first prompts where it begins
    length: int  # places


APART = Sharing(0, 0, 0, 0)


def choose_sharing(own: Tensor, mask: Tensor, beginning: int) -> Sharing:
    """Choose between prompts (B, W), `own` (R,) that of each row, and the beginning of all: what saves more reads."""
    rows, (prompts, width), members = len(own), mask.shape, int(own.bincount().max())
    # Queries of a group are padded to those of the largest one.
    serves = 2 * prompts <= rows and prompts * members <= 2 * rows and bool(mask.any(1).all())
    if width >= SHARED_FROM and serves and (rows - prompts) * width >= (rows - 1) * beginning:
        return Sharing(prompts, members, 0, width)
    if beginning >= SHARED_FROM and rows > 1:
        return Sharing(1, rows, width - int(mask[0].sum()), beginning)
    return APART


class SharedPrompts:
    """Keys and values that rows share by groups; they stay in their place, as a CUDA graph reads them."""

    def __init__(self, multiple: int) -> None:
        """Make no room yet; lengths in use are multiples of `multiple`, so that shapes repeat."""
        self._multiple, self._room = multiple, (0, 0)  # rows, and places of all groups
        self._layers: list[list[Tensor]] = []  # (N, Hkv, D or Dv)
        self._bias = self._members = self._slots = torch.zeros(0)
        self.shape = 0, 0, 0, 0  # rows, groups, members of each and places in use

    def take(self, fed: list[KeysValues], mask: Tensor, sharing: Sharing, of_row: Tensor) -> bool:
        """Keep what rows share of prompts that were fed, with `mask` (B, W) on the host; give whether it has moved."""
        groups, length = sharing.groups, -(-sharing.length // self._multiple) * self._multiple
        sizes = len(of_row), groups * length
        moves = groups > 0 and any(size > room for size, room in zip(sizes, self._room, strict=True))
        if moves:
            self._room = most, places = tuple(map(max, sizes, self._room))  # type: ignore[assignment]
            self._layers = []  # freed before the next are made
            self._layers = [[x.new_zeros(places, x.shape[1], x.shape[3]) for x in pair] for pair in fed]
            self._bias = fed[0][0].new_zeros(places)
            self._members = torch.zeros(2 * most, dtype=torch.int64, device=self._bias.device)
            self._slots = self._members[:most].clone()
        self.shape = len(of_row), groups, sharing.members, length
        if groups:
            seen = slice(sharing.start, sharing.start + sharing.length)
            hidden = nn.functional.pad(mask[:groups, seen] == 0, (0, length - sharing.length), value=True)
            (hidden,) = upload([hidden], self._bias.device)
            self._bias[: groups * length] = self._bias.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf).view(-1)
            for stores, parts in zip(self._layers, fed, strict=True):
                for store, part in zip(map(self._by_group, stores), parts, strict=True):
                    store[:, :, : sharing.length] = part[:groups, :, seen]
                    store[:, :, sharing.length :] = 0  # a nan of an earlier call would pass the mask
        self._arrange(of_row, groups, sharing.members)
        return moves

    def _by_group(self, store: Tensor) -> Tensor:
        _, groups, _, places = self.shape
        return store[: groups * places].view(groups, -1, places, store.shape[-1])

    def _arrange(self, of_row: Tensor, groups: int, members: int) -> None:
        """Take the group (R,) of each row, of which none has more than so many `members`."""
        self.shape = len(of_row), groups, members, self.shape[-1]
        if not groups:
            return
        order = of_row.argsort(stable=True)
        ordered = of_row[order]
        slots = ordered * members + torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
        self._slots[order] = slots
        self._members.zero_()
        self._members[slots] = order

    def shrink(self, of_row: Tensor, *, stays: bool) -> None:
        """Take the group (R,) of fewer rows, with places for as many as the largest group has unless all `stays`."""
        _, groups, members, _ = self.shape
        self._arrange(of_row, groups, members if stays or not groups else int(of_row.bincount().max()))

    def by_layer(self) -> Iterator[SharedKeys | None]:
        """Yield what rows attend to in addition to the cache of each layer; None without end if nothing is shared."""
        rows, groups, members, places = self.shape
        if not groups:
            while True:
                yield None
        of_group = self._members[: groups * members].view(groups, members)
        bias = self._bias[: groups * places].view(groups, 1, 1, places)
        for stores in self._layers:
            parts = *map(self._by_group, stores), bias, of_group, self._slots[:rows]
            yield SharedKeys(*(part.data for part in parts))  # no views, as those of `StepLayer`
