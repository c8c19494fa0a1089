"""Prepare a model for a probe: float32 weights, adapters off the identity, and few layers."""

import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..modes import exchanged
from ..quantised import HALVES, in_float32, is_quantised
from ..walk import ModelWalk


@contextmanager
def float32_weights(walk: ModelWalk, skipped: Collection[nn.Module] = ()) -> Iterator[bool]:
    """Exchange weights in half precision for float32 ones, and shift what is trained of adapters a little.

    Yields whether a layer computes in another dtype than its own. Parameters are never written to. Layers that are
    `skipped` keep theirs; quantised ones do, and multiply in float32.
    """
    left_out = {module for layer in skipped for module in layer.modules()}
    adapted, is_wider = any(kind.__module__.startswith("peft.") for kind in walk.by_class), False
    with ExitStack() as undo:
        for name, module in walk.modules.items():
            if module in left_out:
                continue
            if is_quantised(module):
                undo.enter_context(exchanged([(module, {"forward": in_float32(module)})]))
                is_wider = True
                continue
            for store in (module._parameters, module._buffers):
                for key, tensor in [(key, x) for key, x in store.items() if x is not None]:
                    trained = adapted and tensor.requires_grad
                    if trained or tensor.dtype in HALVES:
                        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
                        is_wider |= tensor.dtype in HALVES
                        if trained:
                            wide = wide + _nudge(wide, f"{name}.{key}")
                        # Known to the stack before it is made: any step may run out of memory.
                        undo.callback(store.__setitem__, key, tensor)  # type: ignore[arg-type]
                        is_parameter = isinstance(tensor, nn.Parameter)
                        store[key] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide  # type: ignore[assignment]
        yield is_wider


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


def _nudge(tensor: Tensor, name: str) -> Tensor:
    """Make repeatable noise, a tenth of the tensor's size, or of an ordinary weight's where it is all zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
    return noise * tensor.square().mean().sqrt().clamp(min=0.2) * 0.1
