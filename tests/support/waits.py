"""Tensors of a make-believe GPU, and a count of what would make the host wait for it.

The CPU computes their values, by the operators' PyTorch forms. Mixing them with tensors of the host is an error.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cfa_kernels.tree.attention import tree_attention_reference
from cfa_kernels.tree.attention_options import AttentionRule
from cfa_kernels.tree.segment_table import SegmentTable
from tests.support.as_on_gpu import AsOnGpu

DEVICE = torch.device("cuda", 0)
# Operators whose kernels on a GPU copy a number to the host before they return.
_WAIT_ALWAYS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::bincount",
}  # fmt: skip
# Those that look at numbers unless this option says how many rows to make, or that lengths need no check.
_WAIT_UNLESS = {"aten::repeat_interleave": "output_size", "aten::segment_reduce": "unsafe"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_CPU_FORM = "row_softmax.py"  # on a GPU a kernel runs in its place
_OWN = tuple(f"{Path(__file__).resolve().parents[2]}/{part}/" for part in ("cfa_kernels", "trainer", "tests"))


class OnDevice(torch.Tensor):
    """A tensor that says it is on `DEVICE`; `inner` holds it."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} runs on a device tensor outside of `Waits`")

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args, kwargs = (), {"device": args[0].device, "dtype": args[0].dtype}
        kwargs.pop("copy", None)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        same = self if dtype in (None, self.dtype) else super().to(dtype)
        return same if device is None or device.type == "cuda" else _fetched("to(cpu)", same)

    def cpu(self) -> Tensor:
        return _fetched("cpu", self)

    def tolist(self) -> Any:
        return _fetched("tolist", self).tolist()


def _fetched(what: str, tensor: Tensor) -> Tensor:
    assert isinstance(tensor, OnDevice)
    Waits.current.note(what)
    return tensor.inner.detach().clone()


class Waits(TorchDispatchMode):
    """Within it the device exists. `seen` says of each wait what caused it and where."""

    current: "Waits"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._pinned: dict[int, Tensor] = {}

    def note(self, what: str) -> None:
        """Count a wait, by the nearest lines of this repository that caused it."""
        files = [frame for frame in inspect.stack()[1:] if frame.filename.startswith(_OWN)]
        own = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in files if frame.filename != __file__]
        if not own[0].startswith(_CPU_FORM):
            self.seen.append(f"{what} at {' < '.join(own[:3])}")

    def upload(self, host: Tensor, non_blocking: bool) -> OnDevice:
        """Copy from the host, which waits unless the copy is from pinned memory and does not block."""
        if not (non_blocking and host.untyped_storage().data_ptr() in self._pinned):
            self.note("upload from pageable memory" if non_blocking else "blocking upload")
        return OnDevice(host.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, leaves = func._schema.name, tree_leaves((args, kwargs))
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", None)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, OnDevice)]
        made_there = device is not None and torch.device(device).type == "cuda"
        if not ours and not made_there:
            made = func(*args, **kwargs)
            if pinned:
                self._pinned[made.untyped_storage().data_ptr()] = made
            return made
        if name.startswith("cfa_kernels::"):
            with self:
                return _run_op(name.removeprefix("cfa_kernels::"), args, kwargs)
        if name == "aten::_to_copy" and not ours:
            result = self.upload(args[0], kwargs.get("non_blocking", False))
            return result if kwargs.get("dtype") is None else OnDevice(result.inner.to(kwargs["dtype"]))
        if name == "aten::copy_" and len(ours) == 1:
            self.note("upload by copy_" if isinstance(args[0], OnDevice) else "download by copy_")
        elif name in _WAIT_ALWAYS or (name in _WAIT_UNLESS and not kwargs.get(_WAIT_UNLESS[name])):
            self.note(name)
        elif name in _INDEXING:
            for index in [x for x in args[1] if x is not None]:
                if index.dtype == torch.bool or not isinstance(index, OnDevice):
                    self.note("boolean index" if index.dtype == torch.bool else "upload of an index")
        elif any(x.ndim and not isinstance(x, OnDevice) for x in tensors) and ours:
            raise RuntimeError(f"{func}: expected all tensors on one device")
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map_only(OnDevice, lambda x: x.inner, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            written = [
                args[i] if i < len(args) else kwargs[argument.name]
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(func._schema.returns) == 1 else tuple(written[: len(func._schema.returns)])
        return tree_map_only(Tensor, OnDevice, out)


def _run_op(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run what an operator's launcher does on the host, then its PyTorch form."""
    if name == "tree_attention":
        q, k, v, sinks, *of_table, scale, softcap, window, chunk, first, with_lse = args
        table = SegmentTable.of(*of_table)
        table.on_device(q.device, 16, first)
        rule = AttentionRule(scale, window, chunk, softcap, None if sinks is None else sinks.inner)
        out = tree_attention_reference(q.inner, k.inner, v.inner, table, rule, first)
        return OnDevice(out), OnDevice(torch.zeros(q.shape[:2] if with_lse else (0,)))
    if name == "tree_attention_backward":  # its gradients are zeros: nobody looks at them
        q, k, v, _, _, _, *of_table, scale, softcap, window, chunk = args[1:]
        table, rule = SegmentTable.of(*of_table), AttentionRule(scale, window, chunk, softcap, None)
        table.on_device(q.device, 16)
        table.key_work_on_device(q.device, 16, 16, rule.reach)
        return *(torch.zeros_like(x) for x in (q, k, v)), q.new_zeros(0)
    as_torch = tree_map_only(str, lambda x: "torch" if x == "triton" else x, (args, kwargs))
    return OPDEFS[f"cfa_kernels::{name}"]._init_fn(*as_torch[0], **as_torch[1])


def put_on_device(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            there = OnDevice(parameter.detach())
            module._parameters[name] = nn.Parameter(there, requires_grad=parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = OnDevice(buffer)
    return model


@contextlib.contextmanager
def a_device() -> Iterator[Waits]:
    """Make the device exist for a while; skips the test on a machine with a real one."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, which PyTorch itself can watch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsOnGpu, "active", False)  # one stand-in is enough
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(Tensor, "pin_memory", lambda x: torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x))
        patch.setattr(torch, "tensor", _tensor(torch.tensor))
        patch.setattr(torch, "as_tensor", _tensor(torch.as_tensor))
        # Gradients are grouped by what C++ takes their device for.
        patch.setattr(clip_grad, "_group_tensors_by_device_and_dtype", lambda lists: {(DEVICE, None): (lists, None)})
        waits = Waits()
        patch.setattr(Waits, "current", waits, raising=False)
        with waits:
            yield waits


def _tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` or `torch.as_tensor`, whose copy of numbers to a device no mode sees."""

    def tensor(data: Any, *, device: torch.device | str | None = None, **options: Any) -> Tensor:
        if isinstance(data, Tensor) or device is None:
            return make(data, device=device, **options)
        made = make(data, **options)
        return Waits.current.upload(made, non_blocking=False) if torch.device(device).type == "cuda" else made

    return tensor
