"""Run decoder layers compiled inside packed forwards: one graph serves all layers of a kind, whatever the pack.

Another graph makes a token of several rows. A model's own forward and the self-check run the layers as they are.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers.cache_utils import Cache

from .attention import RUNNING, TracedMask, TreeMask
from .decode_attention import StepLayer
from .modes import exchanged
from .walk import ModelWalk, own_forward

_LOG = logging.getLogger(__name__)

EAGER: ContextVar[bool] = ContextVar("cfa_eager_layers", default=False)
"""Whether layers run as they are, compiled or not."""


_ALLOWED = {torch.bfloat16: 0.05, torch.float16: 0.02}  # of two layers, by dtype, else `_EXACT`: share of a norm
_EXACT = 1e-4


class CompiledKind:
    """Layers that share one compiled function, and another one for a token of several rows."""

    def __init__(self, layers: Iterable[nn.Module], backend: Any) -> None:
        first, *_ = layers = list(layers)
        self.obstacle: str | None = None  # why they run as they are
        self.decodes = True  # unless they do not compile so, or not to the same results
        self._compared = set[bool]()  # tokens behind shared keys, or others
        self.name, self._backend = type(first).__name__, backend
        inner = _without_checkpointing(type(first).forward)

        def compiled(use: str) -> Any:
            def step(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return inner(layer, *args, **kwargs)

            # torch limits the graphs of a code object, so each kind gets its own.
            step.__code__ = step.__code__.replace(co_name=f"{self.name}_{use}_{id(self)}")
            return torch.compile(step, backend=backend, fullgraph=True)

        self._step, self._token = compiled("rows"), compiled("token")
        each = {id(layer): [*layer.modules()][1:] for layer in layers}  # its own, of FSDP2 say, run around it
        self._hooks = {i: [h for m in own for h in (m._forward_hooks, m._forward_pre_hooks)] for i, own in each.items()}
        # What is traced is the models' own formula, which a compiler fuses; Liger's kernels cannot be. A kind keeps no
        # layer, else `_KINDS` would keep all.
        self.liger = {id(layer): WeakSet(filter(runs_liger, layer.modules())) for layer in layers}
        _KINDS.update(dict.fromkeys(layers, self))

    def stop(self, reason: str) -> None:
        """Run layers of this kind as they are from now on, and say why."""
        self.obstacle = reason
        _LOG.warning("layers of %s run as they are, not compiled: %s", self.name, reason)

    def run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a layer of this kind, checkpointed where transformers would."""
        forward, running = type(layer).forward, RUNNING.get()
        is_tree = isinstance(kwargs.get("attention_mask"), TreeMask) and running is not None
        # Of one row torch would make graphs apart: those run as they are.
        if self.obstacle or not is_tree or args[0].shape[1] == 1 or any(self._hooks[id(layer)]):
            return forward(layer, *args, **kwargs)
        if _without_checkpointing(forward) is not forward and layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(self._run, layer, **kwargs), *args)
        return self._run(layer, *args, **kwargs)

    def _run(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        running, attention = RUNNING.get(), layer.self_attn
        assert running is not None
        store = running.store
        continued = store if running.first_row else None
        before = None if continued is None else continued.stored(attention)
        mask = TracedMask(kwargs["attention_mask"], running.first_row, before)
        hidden, *others = args
        if torch.is_grad_enabled() and not hidden.requires_grad and any(p.requires_grad for p in layer.parameters()):
            args = hidden.detach().requires_grad_(), *others  # the first layer runs by the graph of the others
        _mark_rows((args, kwargs), 1, hidden.shape[1])
        try:
            out = self._step(layer, args, {**kwargs, "attention_mask": mask})
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            self.stop(_summary(error))
            return type(layer).forward(layer, *args, **kwargs)
        if continued is not None:
            continued.next_call(attention)
        elif store is not None:
            assert mask.kept is not None
            store.write(attention, *mask.kept)
        return out

    def run_token(self, cache: StepLayer, layer: Any, hidden: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Run a layer of this kind for a token of each row (R, 1, H); `cache` has the layer's keys and values."""
        forward, rows = type(layer).forward, len(hidden)
        if not self.decodes or rows == 1 or any(self._hooks[id(layer)]):
            return forward(layer, hidden, *args, **kwargs)
        _mark_rows((hidden, args, kwargs), 0, rows)
        parts = kwargs.get("attention_mask"), *cache.seen, *(cache.shared or ())
        for part, dims in zip(parts, ((0, 3), *[(0, 2)] * 4, (0, 3), (0, 1), (0,)), strict=False):
            if part is not None:
                torch._dynamo.maybe_mark_dynamic(part, dims)
        shares = cache.shared is not None
        known = (TorchDynamoException, FailOnRecompileLimitHit) if shares in self._compared else Exception
        try:
            own = {name: cache if isinstance(value, Cache) else value for name, value in kwargs.items()}
            result, reason = self._token(layer, (hidden, *args), own), ""
        except known as error:  # at first any: generated code asserts, and kernels refuse, what no compiler foresaw
            result, reason = None, _summary(error)
        if result is not None and shares in self._compared:
            return result
        out = forward(layer, hidden, *args, **kwargs)  # what it raises itself is not the compiler's to say
        self._compared.add(shares)
        if result is not None:
            reason = difference("a token's results", out, result, out.dtype)
        if reason:
            self.decodes = False
            _LOG.warning("layers of %s decode as they are, not compiled: %s", self.name, reason)
        return out


_KINDS: WeakKeyDictionary[nn.Module, CompiledKind] = WeakKeyDictionary()


def difference(what: str, own: torch.Tensor, ours: torch.Tensor, dtype: torch.dtype) -> str:
    """Say how far results that layers give compiled, in arithmetic of `dtype`, are from `own`; nothing if near."""
    casts = torch.is_autocast_enabled(own.device.type)
    allowed = _ALLOWED.get(torch.get_autocast_dtype(own.device.type) if casts else dtype, _EXACT)
    own_norm = own.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
    error = ((ours - own).float().norm() / own_norm).item()
    return "" if error <= allowed else f"{what} differ by {error:.2g} of their norm, allowed are {allowed:g}"


def _summary(error: Exception) -> str:
    first, _, more = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first} {more.strip().partition(chr(10))[0]}"


def inside_checkpoints(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """List layers, without the `CheckpointWrapper` of torch around them."""
    return [layer._modules.get("_checkpoint_wrapped_module") or layer for layer in layers]


def to_compile(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, CompiledKind, object]]:
    """List those of `layers` that run compiled, with their kinds and with what has their `forward`."""
    each = [] if EAGER.get() else inside_checkpoints(layers)
    some = [(layer, _KINDS.get(layer), _has_forward(layer)) for layer in each]
    return [(layer, kind, owner) for layer, kind, owner in some if owner and kind and not kind.obstacle]


def compile_copies(copies: Iterable[nn.Module], layers: Iterable[nn.Module]) -> None:
    """Compile copies of layers, too, where these run compiled and the copies do not yet."""
    pairs = zip(inside_checkpoints(copies), inside_checkpoints(layers), strict=True)
    kinds = [(copy, _KINDS.get(layer)) for copy, layer in pairs if copy not in _KINDS]
    for kind in {kind for _, kind in kinds if kind and not kind.obstacle}:
        CompiledKind([copy for copy, own in kinds if own is kind], kind._backend)


def _has_forward(layer: nn.Module) -> object:
    """Return what has the forward of a layer's class: the layer, or what holds its errors; None for another forward."""
    own = vars(layer).get("forward", layer)
    its_class = getattr(own, "forward", None)
    return own if getattr(its_class, "__func__", None) is type(layer).forward else None


@contextmanager
def compiled_layers(
    some: Sequence[tuple[nn.Module, CompiledKind, object]], caches: Mapping[nn.Module, StepLayer] | None = None
) -> Iterator[None]:
    """Run what `to_compile` has listed compiled inside: packed forwards, or steps of a token by layers' `caches`."""
    if not some:
        yield
        return
    # Sizes that happen to be equal in one pack, of its segments and of an adapter say, are not equal in the next. A
    # number with a fraction is a constant: as a symbol each graph would be traced twice. DDP overlaps layer by layer.
    apart = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    constant = torch._dynamo.config.patch(specialize_float=True, optimize_ddp=False)
    own = ((m, {"forward": MethodType(type(m).forward, m)}) for each, kind, _ in some for m in kind.liger[id(each)])
    runs = [kind.run if caches is None else partial(kind.run_token, caches[layer]) for layer, kind, _ in some]
    ours = ((one[2], {"forward": partial(run, one[0])}) for one, run in zip(some, runs, strict=True))
    with apart, constant, exchanged((*own, *ours)):
        yield


def any_liger(walk: ModelWalk) -> bool:
    """Whether some module runs a kernel of Liger's."""
    return any(_is_ligers(kind.forward) for kind in walk.by_class) or any(map(runs_liger, walk.owning("forward")))


def runs_liger(module: nn.Module) -> bool:
    """Whether a module runs a kernel of Liger's."""
    return _is_ligers(own_forward(module) or type(module).forward)


def _is_ligers(forward: Any) -> bool:
    return bool(forward.__module__.startswith("liger_kernel"))


def _without_checkpointing(forward: Any) -> Any:
    """Return a layer's forward inside the one by which transformers checkpoints it."""
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward


def _mark_rows(inputs: Any, dim: int, rows: int) -> None:
    """Say which sizes differ from pack to pack; all others, of adapters say, are constants of a graph."""
    if isinstance(inputs, torch.Tensor):
        if inputs.dim() > 1 and inputs.shape[dim] == rows and not hasattr(inputs, "_dynamo_weak_dynamic_indices"):
            torch._dynamo.maybe_mark_dynamic(inputs, dim)
    elif isinstance(inputs, (tuple, list, dict)):
        for one in inputs.values() if isinstance(inputs, dict) else inputs:
            _mark_rows(one, dim, rows)
