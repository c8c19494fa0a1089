"""Refuse on a machine without a GPU what one would refuse.

`DEVICE` is the GPU, or host memory by another name: `AsOnGpu` follows what is made on `DEVICE` or moved there through
every function of torch. It refuses tensors of both sides in one call, `backend="triton"` for tensors of the host, and
by default heads and dtypes that the kernels do not take. The default backend still runs the PyTorch forms. To follow
every function takes a third of a test's time, so tests that cannot put anything there run without (`mode_of`).
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

from cfa_kernels.loss import policy
from cfa_kernels.model import lora

linear_logprob, tree_attention = (
    import_module(f"cfa_kernels.{name}") for name in ("ops.linear_logprob", "tree.attention")
)
DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu", 0)

_LEAVES = {int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, slice}
# Functions of one tensor that give none: the most frequent calls, in which nothing can be mixed.
_FIELDS = "shape", "dtype", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout"
_ASKING = {getattr(Tensor, name).__get__ for name in _FIELDS} | {torch._C._set_grad_enabled}
_ASKING |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.data_ptr, Tensor.__len__}

# Functions that take tensors of both sides, and give what is where their first one is.
_BY_FIRST = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, torch._has_compatible_shallow_copy_type}
# Of the library's operators.
_HOST_ARGUMENTS = {
    "handle",
    "segments",
    "contexts",
    "kept_offsets",
    "kept_ids",
    "kept_logprobs",
    "linear_policy_loss.rows",
}

Tensor._as_on_gpu = False  # type: ignore[attr-defined]


def on_gpu(tensor: Tensor) -> bool:
    return tensor._as_on_gpu  # type: ignore[attr-defined]


def mode_of(item: pytest.Item) -> contextlib.AbstractContextManager[Any]:
    """The mode, for a test that can name `DEVICE`; any other has tensors of the host only, and may launch no kernel."""
    there = "device" in item.fixturenames or _knows_device(item.module.__name__)  # type: ignore[attr-defined]
    return AsOnGpu() if there else on_host_only()


@functools.cache
def _knows_device(name: str) -> bool:
    """Whether a module of tests has `DEVICE`, or a function or class from another that has."""
    values = vars(sys.modules[name]).values()
    others = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in values} - {name}
    return any(value is DEVICE for value in values) or any(
        _knows_device(other) for other in others if isinstance(other, str) and other.startswith("tests.support.")
    )


@contextlib.contextmanager
def on_host_only() -> Iterator[None]:
    AsOnGpu.refuses_launches = True
    try:
        yield
    finally:
        AsOnGpu.refuses_launches = False


class AsOnGpu(TorchFunctionMode):
    """While it is active, `DEVICE` is another device than the host."""

    active, refuses_launches = False, False

    def __enter__(self) -> "AsOnGpu":
        AsOnGpu.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        AsOnGpu.active = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not AsOnGpu.active or func in _ASKING:
            return func(*args, **kwargs)
        if func in _SPECIAL:
            return _SPECIAL[func](func, args, kwargs)
        out = func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None:
            return _mark(out, torch.device(device) == DEVICE)
        there, here = _sides((*args, *kwargs.values()) if kwargs else args)
        if not there:
            return out
        if here:
            _refuse_mixtures(func, args, kwargs)
        return _mark(out, True)


def _sides(values: Any) -> tuple[bool, bool]:
    """Whether a tensor among values is on the GPU, and whether one is on the host."""
    there, here = False, False
    for value in values:
        if isinstance(value, Tensor):
            if value._as_on_gpu:  # type: ignore[attr-defined]
                there = True
            else:
                here = True
        elif type(value) not in _LEAVES and isinstance(value, (list, tuple)):
            sides = _sides(value)
            there, here = there or sides[0], here or sides[1]
    return there, here


def _tensors(values: Any) -> list[Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _LEAVES and isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _mark(out: Any, there: bool) -> Any:
    for tensor in (out,) if isinstance(out, Tensor) else _tensors((out,)):
        tensor._as_on_gpu = there  # type: ignore[attr-defined]
    return out


def _set_data(func: Any, args: Any, _: Any) -> None:
    func(*args)
    _mark(args[0], on_gpu(args[1]))


def _to_numpy(func: Any, args: Any, kwargs: Any) -> Any:
    if on_gpu(args[0]):
        raise TypeError("can't convert a tensor of the GPU to numpy: call .cpu() first")
    return func(*args, **kwargs)


def _to(func: Any, args: Any, kwargs: Any) -> Tensor:
    there = on_gpu(args[0])
    if len(args) > 1 and isinstance(args[1], Tensor):
        there = on_gpu(args[1])
    elif len(args) != 2 or not isinstance(args[1], torch.dtype):
        device = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})[0]
        there = there if device is None else device == DEVICE
    return _moved(args[0], func(*args, **kwargs), there)


def _grad(func: Any, args: Any, kwargs: Any) -> Any:
    gradients = func(*args, **kwargs)
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    for gradient, x in zip(gradients, _tensors((inputs,)), strict=True):
        _mark(gradient, on_gpu(x))
    return gradients


def _moved(source: Tensor, out: Tensor, there: bool) -> Tensor:
    return out if there == on_gpu(out) else _mark(out.clone() if out is source else out, there)


_SPECIAL = {
    Tensor.device.__get__: lambda func, args, _: DEVICE if on_gpu(args[0]) else func(*args),
    Tensor.data.__set__: _set_data, torch.autograd.grad: _grad, Tensor.to: _to,
    Tensor.cpu: lambda func, args, kwargs: _moved(args[0], func(*args, **kwargs), False),
    Tensor.cuda: lambda func, args, kwargs: _moved(args[0], args[0], True),
    **dict.fromkeys((Tensor.numpy, Tensor.__array__), _to_numpy),
    **dict.fromkeys(_BY_FIRST, lambda func, args, kwargs: _mark(func(*args, **kwargs), on_gpu(args[0]))),
}  # fmt: skip


def _refuse_mixtures(func: Any, args: Any, kwargs: Any) -> None:
    tensors = _tensors((*args, *kwargs.values()))
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.name.startswith("cfa_kernels::"):
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        operator = schema.name.removeprefix("cfa_kernels::")
        there = [value for k, value in named.items() if _HOST_ARGUMENTS.isdisjoint((k, f"{operator}.{k}"))]
        tensors = _tensors(there)
    if len({on_gpu(tensor) for tensor in tensors if tensor.ndim}) > 1:
        sides = ", ".join(f"{'GPU' if on_gpu(x) else 'host'} {tuple(x.shape)}" for x in tensors)
        raise RuntimeError(f"{func}: on a GPU its tensors would be on different devices: {sides}")


def _as_its_data(new: Callable[..., nn.Parameter]) -> Callable[..., nn.Parameter]:
    """A parameter's constructor, which no mode sees."""

    def made(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
        parameter = new(cls, data, requires_grad)
        return parameter if data is None else _mark(parameter, on_gpu(data))

    return made


# The default backend


def _checked(module: ModuleType, check: Callable[[dict[str, Any]], object]) -> Callable[[str | None, Tensor], str]:
    """`resolve_backend` as `module` calls it, which runs `check` on the caller's variables where a GPU would."""
    resolve = module.resolve_backend

    def resolved(backend: str | None, tensor: Tensor) -> str:
        chosen = resolve(backend, tensor)
        # Within an operator or a backward no mode is active, and nothing is told apart.
        if AsOnGpu.active and torch._C._len_torch_function_stack() and not torch.compiler.is_compiling():
            if backend is None and on_gpu(tensor):
                check(sys._getframe(1).f_locals)
            if backend == "triton" and not on_gpu(tensor):
                raise RuntimeError("backend='triton' would be refused on a GPU: a tensor is on the host")
        return chosen

    return resolved


def _launched(launch: Callable[..., None]) -> Callable[..., None]:
    """The interpreter's launch of a kernel, which takes tensors of the GPU only."""

    def launched(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        # Within an operator no mode is active, and nothing is told apart; its own tensors were looked at before.
        if AsOnGpu.refuses_launches or (
            AsOnGpu.active and torch._C._len_torch_function_stack() and not all(map(on_gpu, _tensors(args)))
        ):
            raise RuntimeError(f"{self.fn}: on a GPU a kernel would refuse a tensor of the host")
        launch(self, *args, **kwargs)

    return launched


def install() -> None:
    """Put the checks into the library, for good."""
    GridExecutor.__call__ = _launched(GridExecutor.__call__)  # type: ignore[method-assign]
    nn.Parameter.__new__ = _as_its_data(nn.Parameter.__new__)  # type: ignore[method-assign]
    # Within an operator or a backward no mode is active, and nothing is told apart: nobody asks there.
    lora.is_on_gpu = lambda tensor: AsOnGpu.active and on_gpu(tensor)
    checks = {
        tree_attention: lambda of: tree_attention._check_triton(of["q"], of["k"], of["v"]),
        linear_logprob: lambda of: linear_logprob._check(
            *(of[x] for x in ("hidden", "lm_head", "targets", "bias")), "triton"
        ),
        policy: lambda of: policy.check_logits_dtype("", of["logits" if "logits" in of else "hidden"], "triton"),
    }
    for module, check in checks.items():
        module.resolve_backend = _checked(module, check)
