"""Decode completions with a cache that stays: prompts are fed once each, then one step makes a token of each row.

Rows that begin alike keep the keys of their beginning once, if it is long, and a cache of what follows each.

A step is the forward of the last tokens, the draw of the next ones and the flags of rows that have ended. It reads and
writes only tensors that keep their place, so that on a GPU a CUDA graph of it is replayed, in later calls too. Once a
quarter of the rows have ended, or half of those of a graph, they leave.
"""

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cfa_kernels import KeptTokens
from cfa_kernels.model.compiled import compiled_layers, inside_checkpoints, to_compile
from cfa_kernels.model.decode_attention import (
    CannotShare,
    StepLayer,
    a_step,
    cache_argument,
    decoding_attention,
    sharing_obstacle,
)
from cfa_kernels.model.parts import backbone
from cfa_kernels.model.side_by_side import Projections
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.ops.upload import upload

from .prompts import APART, KeysValues, SharedPrompts, choose_sharing, common_beginning, feed
from .sampling import CANDIDATES, KeptRecord, draw

LOOK = 16  # tokens between two looks at a GPU's results, or for a stop string
_WIDER = {CANDIDATES: 4096, 4096: sys.maxsize}  # candidates that follow those which do not hold a nucleus
_LENGTHS = 64  # of prompts, caches and what a graph reads of them are a multiple of it, so that shapes repeat
_FEWEST_ROWS = 8  # of a graph; others are powers of two
_LOG = logging.getLogger(__name__)


class Sampling(NamedTuple):
    """Options of sampling, and where completions end."""

    greedy: bool
    temperature: float
    top_p: float
    ends: tuple[int, ...]
    pad: int  # that `generate` puts behind an end
    stopped: Callable[[Tensor], Tensor] | None = None  # which rows of tokens (R, t) hold a stop string, (R, 1) bool

    @property
    def cuts(self) -> bool:
        """Whether tokens are drawn from a nucleus."""
        return not self.greedy and self.top_p < 1


class _State(NamedTuple):
    """Tensors that a step reads and writes, for R rows and L places; a column holds what follows that place."""

    token: Tensor  # (R, 1) int64, the last one
    padding: Tensor  # (R, 1) int64, places before the prompt, or before what is not shared of it
    before: Tensor  # (R, 1) int64, tokens before those of the cache, which rows share
    group: Tensor  # (R, 1) int64, of rows that share them
    ended: Tensor  # (R, 1) bool
    tokens: Tensor  # (R, L) int64
    logprobs: Tensor  # (R, L) fp32, nan where logits were not finite
    uniforms: Tensor  # (R, L) float64
    place: Tensor  # (1,) int64, of the last token
    missed: Tensor  # (1,) bool, whether a nucleus was larger than the candidates


_BY_ROW = 8  # fields
_DTYPES = *[torch.int64] * 4, torch.bool, torch.int64, torch.float32, torch.float64, torch.int64, torch.bool


class Decoder:
    """Decoding by a model whose layers keep keys and values and nothing else."""

    def __init__(self, model: PreTrainedModel, *, captured: bool = False, longest: int = 0) -> None:
        """Record steps as CUDA graphs if `captured`; the cache begins with room for `longest` tokens."""
        self._model, self._captured, self._places = model, captured, 0
        self._longest, self._cache = longest and longest + _LENGTHS, cache_argument(model)
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._multiple = 1 if on_cpu and not captured else _LENGTHS
        self._state: _State | None = None
        self._layers: list[StepLayer] = []
        self.projections = Projections(model) if captured else None
        self._graphs: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._pool, self._addresses = None, list[int]()
        self._shares, self._shared = True, SharedPrompts(self._multiple)
        # `TokenDraw.kept` of C candidates: (R, t, 2, C) of the places, modulo t, between two looks; t = 1 of one token.
        self._kept, self._looked_at = dict[int | None, Tensor](), torch.zeros(0)

    def __call__(
        self, ids: Tensor, mask: Tensor, uniforms: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, list[KeptTokens] | None]:
        """Complete prompts (B, P), padded on the left, with `uniforms` (B, T) for as many tokens, all on the host.

        Returns tokens and log-probs, (B, T) or up to where all rows have ended, these in fp32, 0 if greedy, nan where
        logits were not finite; and the ids of each completion's nuclei, None without a nucleus.
        """
        with decoding_attention(self._model):
            try:
                return self._complete(ids, mask, uniforms, sampling)
            except CannotShare as reason:
                _LOG.warning("each completion keeps the keys of its whole prompt: %s", reason)
            self._shares, self._shared = False, SharedPrompts(self._multiple)
            return self._complete(ids, mask, uniforms, sampling)

    def _complete(
        self, ids: Tensor, mask: Tensor, uniforms: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, list[KeptTokens] | None]:
        (count, length), multiple = uniforms.shape, self._multiple
        rows = self._rows_for(count)
        width, fill = -(-max(1, ids.shape[1] - 1) // multiple) * multiple, torch.arange(rows) % count
        prompts = nn.functional.pad(torch.stack([ids, mask])[:, fill], (width + 1 - ids.shape[1], 0))
        prefixes, own = prompts[:, :, :-1].unique(dim=1, return_inverse=True)  # a group's prompt is fed once
        padding, ended = width - prompts[1, :, :-1].sum(1, keepdim=True), torch.arange(rows)[:, None] >= count
        beginning = common_beginning(*prefixes)
        sharing = choose_sharing(own, prefixes[1], beginning) if self._shares else APART
        if sharing.length and (obstacle := sharing_obstacle(self._model)):
            raise CannotShare(obstacle)
        fed = feed(self._model, prefixes[0], prefixes[1], beginning)
        cached = padding.clamp(max=width - sharing.length)  # the cache begins behind what is shared
        of_row = own[:, None].clamp(max=max(sharing.groups - 1, 0))
        host = [own, uniforms[fill], prompts[0, :, -1:], cached, sharing.length + cached - padding, of_row, ended]
        own, uniforms, *columns = upload(host, next(self._model.parameters()).device)
        width -= sharing.length
        if self._layers and any(old.keys.dtype != new[0].dtype for old, new in zip(self._layers, fed, strict=True)):
            self._state, self._shared = None, SharedPrompts(self._multiple)  # the model has been cast
        moved = self._shared.take(fed, prefixes[1], sharing, columns[3].view(-1))
        state = self._state_of(rows, width + length, fed, moved)
        for layer, parts in zip(self._layers, fed, strict=True):
            for store, part in zip((layer.keys, layer.values), parts, strict=True):
                store[:rows] = 0  # a nan of an earlier call would pass the mask
                rest = part[:, :, sharing.length :][own]  # all, or a window's last ones
                store[:rows, :, width - rest.shape[2] : width] = rest
        for part, column in zip(state, columns, strict=False):
            part.copy_(column)
        state.uniforms[:, width : width + length] = uniforms
        del fed, parts, rest
        record = KeptRecord()
        blocks = getattr(backbone(self._model), "layers", ()) if self._captured else ()
        caches = dict(zip(inside_checkpoints(blocks), self._layers, strict=False))
        together = self.projections.together() if self.projections else nullcontext()
        with together, compiled_layers(to_compile(caches), caches):
            made = self._decode(state, width, length, sampling, record)
        drawn = slice(width, width + made)
        return state.tokens[:count, drawn], state.logprobs[:count, drawn], record.rows(count, made)

    def _rows_for(self, count: int) -> int:
        return max(_FEWEST_ROWS, 1 << (count - 1).bit_length()) if self._captured else count

    def _state_of(self, rows: int, places: int, fed: list[KeysValues], moved: bool) -> _State:
        """State of so many rows, with room for so many places; graphs stay if all that they read stays in place."""
        old = 0 if self._state is None else len(self._state.token)
        grows = rows > old or places > self._places
        addresses = [weight.data_ptr() for weight in ModelWalk.of(self._model).parameters()] if self._captured else []
        if self._graphs and (grows or moved or addresses != self._addresses):
            cause = f"the cache grows to {rows} rows, {places} tokens" if grows or moved else "the weights have moved"
            _LOG.warning("%d CUDA graphs of decoding will be captured again: %s", len(self._graphs), cause)
            self._graphs, self._pool = {}, None
        self._addresses = addresses
        if self._state is None or grows:
            self._state, self._layers, self._kept = None, [], {}  # freed before the next are made
            longest = 0 if self._shared.shape[1] else self._longest
            most, self._places = max(rows, old), -(-max(places, longest, self._places) // _LENGTHS) * _LENGTHS
            sizes = [(most, 1)] * 5 + [(most, self._places)] * 3 + [(1,)] * 2
            new = functools.partial(torch.zeros, device=fed[0][0].device)
            self._state = _State(*(new(size, dtype=dtype) for size, dtype in zip(sizes, _DTYPES, strict=True)))
            for pair in fed:  # and a place that is never seen, as contiguous keys would be a graph of their own
                keys, values = (x.new_zeros(most, x.shape[1], self._places + 1, x.shape[3]) for x in pair)
                self._layers.append(StepLayer(keys, values, self._state.place))
        return _State(*(part[:rows] for part in self._state))

    def _decode(self, state: _State, width: int, length: int, sampling: Sampling, record: KeptRecord) -> int:
        """Decode from place `width` on until all rows have ended, or `length` tokens; give the number of tokens."""
        deferred = self._captured or state.token.device.type == "cuda"  # a look at results is a wait
        made, all_until, candidates = 0, 0, CANDIDATES if deferred else None
        whole, order = state, torch.arange(len(state.token), device=state.token.device)
        while made < length:
            # Between two looks wide draws are kept: 16 of 512 rows would take 268 MB, and thrice that for a moment.
            steps = 1 if candidates in (None, sys.maxsize) else LOOK if candidates == CANDIDATES else LOOK // 4
            if sampling.cuts and candidates in _WIDER and candidates not in self._kept:
                size = len(self._layers[0].keys), steps, 2, candidates
                self._kept[candidates] = torch.full(size, -1, dtype=torch.int32, device=order.device)
            times, before = min(steps, length - made), (state.token.clone(), state.ended.clone())
            state.place.fill_(width + made)
            state.missed.fill_(False)
            live = width + made + times
            live = min(-(-live // self._multiple) * self._multiple, self._places)
            self._run(times, state, live, sampling, candidates)
            where = slice(width + made, width + made + times)
            (*ended, missed), kept = self._look(state, order, where, self._kept.get(candidates), sampling)
            if missed and candidates in _WIDER:  # the same draws once more, among more tokens
                candidates, all_until = _WIDER[candidates], made + LOOK
                state.token.copy_(before[0])
                state.ended.copy_(before[1])
                continue
            if kept is not None:
                record.add(*kept, made)
            made += times
            if candidates == sys.maxsize and made >= all_until:
                candidates = max(_WIDER)  # back to what a graph holds
            if sampling.stopped and made % LOOK == 0:
                state.ended.logical_or_(sampling.stopped(state.tokens[:, width : width + made]))
                ended = state.ended.view(-1).tolist()
            if all(ended):
                break
            if 4 * (rows := self._rows_for(ended.count(False))) <= 3 * len(ended):
                state = self._without_ended(state, order[: len(ended)], rows, width + made)
        for part in (whole.tokens, whole.logprobs):
            part.copy_(part[order.argsort()])
        return made

    def _look(
        self, state: _State, order: Tensor, places: slice, kept: Tensor | None, sampling: Sampling
    ) -> tuple[list[int], tuple[np.ndarray, np.ndarray] | None]:
        """Bring `ended` and `missed` to the host, and, of a nucleus, rows (R,) and `kept` (R, t, 2, C); by one wait."""
        rows, flags = len(state.token), [state.ended.view(-1), state.missed]
        if not sampling.cuts:
            return torch.cat(flags).tolist(), None
        if kept is None:
            kept, self._looked_at = self._looked_at, torch.zeros(0)  # freed, as it may be as wide as the vocabulary
        else:
            kept = kept[:rows, torch.arange(places.start, places.stop, device=order.device) % kept.shape[1]]
        if kept.shape[3] > CANDIDATES and kept.is_cuda:  # most of it is empty
            order_of = kept[:, :, :1].argsort(-1, descending=True)[..., : int((kept[:, :, 0] >= 0).sum(-1).max())]
            kept = kept.gather(-1, order_of.expand(-1, -1, 2, -1))
        host = torch.cat([*flags, order[:rows], kept.flatten()]).cpu().numpy()
        own, ids = np.split(host[rows + 1 :], [rows])
        return host[: rows + 1].tolist(), (own, ids.reshape(kept.shape))

    def _without_ended(self, state: _State, order: Tensor, rows: int, live: int) -> _State:
        """Move rows that have ended behind the others, in `order` too; give the state of the first `rows`."""
        place = state.ended.view(-1).byte().argsort(stable=True)
        by_row = state[:_BY_ROW]
        for part in (order, *by_row):
            part.copy_(part[place])
        for layer in self._layers:
            for store in (layer.keys, layer.values):
                store[:rows, :, :live] = store[place[:rows], :, :live]
        self._shared.shrink(state.group[:rows].view(-1), stays=self._captured)
        return _State(*(part[:rows] for part in by_row), *state[_BY_ROW:])

    def _run(self, times: int, state: _State, *options: Any) -> None:
        step, key = functools.partial(self._step, state, *options), (len(state.token), self._shared.shape, *options)
        if self._captured and key not in self._graphs and times > 1:
            step()  # a token like others, and the warm-up: what happens only once cannot be captured
            times -= 1
            try:
                self._graphs[key], self._pool = capture(step, self._pool)
            except RuntimeError as problem:
                _LOG.warning("decoding launches every layer of a step; no CUDA graph can be captured: %s", problem)
                self._graphs[key] = step
        for _ in range(times):
            self._graphs.get(key, step)()

    def _step(self, state: _State, live: int, sampling: Sampling, candidates: int | None) -> None:
        for layer, shared in zip(self._layers, self._shared.by_layer(), strict=False):
            layer.begin(len(state.token), live, shared)
        seen, cache = torch.arange(live, device=state.place.device) >= state.padding, Cache(layers=[*self._layers])
        at = state.place - state.padding + state.before
        options = {"position_ids": at, self._cache: cache, "use_cache": True}
        with a_step():
            scores = self._model(input_ids=state.token, attention_mask=seen, **options).logits[:, -1]
        if not all(layer.shared is None or layer.shared_is_read for layer in self._layers):
            raise CannotShare(f"a layer of {type(self._model).__name__} attends by other functions than transformers'")
        uniforms = None if sampling.greedy else state.uniforms.index_select(1, state.place)
        token, logprobs, held, kept = draw(scores, uniforms, sampling.temperature, sampling.top_p, candidates)
        if kept is not None and candidates in self._kept:
            store = self._kept[candidates][: len(kept), :, :, : kept.shape[2]]
            store.index_copy_(1, state.place % store.shape[1], kept[:, None])
        elif kept is not None:
            self._looked_at = kept[:, None]
        state.missed.logical_or_((~held & ~state.ended).any())
        state.token.copy_(token)  # behind an end, too, where nothing counts
        state.tokens.index_copy_(1, state.place, token)
        state.logprobs.index_copy_(1, state.place, logprobs)
        for end in sampling.ends:
            state.ended.logical_or_(token == end)
        state.place.add_(1)


def capture(step: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
    """Record a step as a CUDA graph in a pool of memory, or in a new one; gives what replays it, and the pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay, graph.pool()
