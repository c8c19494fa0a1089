"""Prepare a model for a short probe: windows that matter in it, float32 weights, adapters off the identity."""

import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modes import attributes_set, exchanged
from ..quantised import HALVES, in_float32, is_quantised
from ..sharded.fsdp import gather_zero3, holds_pieces, is_fsdp2, is_zero3_weight

_SMALL = 5  # tokens: the window and chunk during a probe


def small_windows(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Set windows and chunks that matter in a short probe; each forward builds its masks from the configuration."""
    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs += [config.get_text_config() for config in configs]
    limits = ((config, name) for config in configs for name in ("sliding_window", "attention_chunk_size"))
    values = [(config, name, getattr(config, name, None)) for config, name in limits]
    return attributes_set(
        (config, name, _SMALL) for config, name, value in values if isinstance(value, int) and value > _SMALL
    )


@contextmanager
def float32_weights(model: PreTrainedModel, moved: bool, skipped: Collection[nn.Module] = ()) -> Iterator[None]:
    """Run with half-precision weights in float32, one layer at a time; shift trainable adapters a little if `moved`.

    Parameters are never touched; under ZeRO-3 their memory is exchanged. Layers that are `skipped` keep theirs.
    Quantised ones keep theirs too and multiply in float32.
    """
    names = {module: name for name, module in model.named_modules()}
    adapted = moved and any(type(module).__module__.startswith("peft.") for module in names)
    outside, sites = _sites(model)
    sites = {site: modules for site, modules in sites.items() if site not in skipped}

    def widen(modules: list[nn.Module], undo: ExitStack) -> None:
        gather_zero3(modules, undo)
        for module in modules:
            if is_quantised(module):
                undo.enter_context(exchanged([(module, {"forward": in_float32(module)})]))
                continue
            # Inside its call, torch's first FSDP has the weights as plain attributes.
            for store in (module._parameters, module._buffers, vars(module)):
                for name, tensor in [(name, x) for name, x in store.items() if isinstance(x, Tensor)]:
                    trained = adapted and tensor.requires_grad
                    if trained or tensor.dtype in HALVES:
                        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
                        if trained:
                            wide = wide + _nudge(wide, f"{names[module]}.{name}")
                        _exchange(store, name, tensor, wide, undo)

    # Each exchange is undone by a stack that knows of it before it is made: any step may run out of memory.
    with ExitStack() as rest:
        inside = {site: rest.enter_context(ExitStack()) for site in sites}

        def enter(site: nn.Module, _: object) -> None:
            widen(sites[site], inside[site])

        def leave(site: nn.Module, *_: object) -> None:
            inside[site].close()

        widen(outside, rest)
        for site in sites:  # after the hook that gathers a sharded layer, and before that which drops it
            rest.enter_context(site.register_forward_pre_hook(enter))
            rest.enter_context(site.register_forward_hook(leave, prepend=True, always_call=True))
        yield


@contextmanager
def layers_skipped(repeated: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Let layers hand their input on, in the form in which the first layer of their kind, which ran before, does."""
    outputs: dict[nn.Module, Any] = {}

    def skip(first: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden, output = args[0] if args else kwargs["hidden_states"], outputs[first]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def keep(first: nn.Module, _: object, output: Any) -> None:
        outputs[first] = output

    with ExitStack() as stack:
        for first in set(repeated.values()):
            stack.enter_context(first.register_forward_hook(keep))
        stack.enter_context(exchanged((each, {"forward": partial(skip, first)}) for each, first in repeated.items()))
        yield


def _exchange(store: dict[str, Any], name: str, tensor: Tensor, wide: Tensor, undo: ExitStack) -> None:
    if is_zero3_weight(tensor):  # what DeepSpeed has noted about a parameter is on the parameter itself
        undo.callback(setattr, tensor, "data", tensor.data)
        tensor.data = wide
    else:
        undo.callback(store.__setitem__, name, tensor)
        store[name] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide


def _sites(model: nn.Module) -> tuple[list[nn.Module], dict[nn.Module, list[nn.Module]]]:
    """Split the modules of a model into those outside every site, and those of each site.

    Sites are layers and units of FSDP whose weights are in pieces outside their own forward.
    """
    outside, sites, seen = list[nn.Module](), dict[nn.Module, list[nn.Module]](), set[nn.Module]()

    def add(module: nn.Module, own: list[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        own.append(module)
        for child in module.children():
            inner = getattr(child, "_fsdp_wrapped_module", child)
            layer = isinstance(module, nn.ModuleList) and own is outside
            if layer or inner is not child or (is_fsdp2(child) and holds_pieces(child)):
                add(inner, sites.setdefault(inner, []))
            else:
                add(child, own)

    add(model, outside)
    return outside, sites


def _nudge(tensor: Tensor, name: str) -> Tensor:
    """Make repeatable noise, a tenth of the tensor's size, or of an ordinary weight's where it is all zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
    return noise * tensor.square().mean().sqrt().clamp(min=0.2) * 0.1
