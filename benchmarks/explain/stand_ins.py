"""What a GPU would run in place of what a device without memory cannot: Triton's launches and torch's own attention.

Liger's functions and `scaled_dot_product_attention` are exchanged for functions that launch nothing and count one
kernel each, with the bytes of what it is given and what it gives, in the forward and in the backward.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.explain.tally import ATTENTION, Tally
from benchmarks.harness.traffic import nbytes

_LIGER = {  # how many results, each like the argument of its place; from which argument on the backward reads them
    "LigerRMSNormFunction": (1, 0),
    "LigerSiLUMulFunction": (1, 0),
    "LigerGELUMulFunction": (1, 0),
    "LigerRopeFunction": (2, 2),
}
_PATCHED = (
    ("cfa_kernels.hf.liger._on_gpu", lambda model: True),
    ("cfa_kernels.ops.matmul._keeps_sums", lambda tensor: True),
    ("cfa_kernels.ops.tree_attention.resolve_backend", lambda backend, tensor: "triton"),
    ("cfa_kernels.ops.linear_logprob.resolve_backend", lambda backend, tensor: "triton"),
    ("cfa_kernels.losses.policy.resolve_backend", lambda backend, tensor: "triton"),
    ("torch.is_autocast_enabled", lambda *device: False),  # does not know the device
    # The program checks once per model that it computes the same on packed trees: on tensors that have values.
    ("cfa_kernels.hf.verify._check_layout", lambda *model, **mode: None),
    ("cfa_kernels.hf.verify._check_repeatable", lambda model: None),
    ("cfa_kernels.hf.verify._checked_transform", lambda model: (None, 1.0)),
)


def has_liger() -> bool:
    """Whether Liger is installed: norms, rotary embeddings and gates are its kernels then."""
    return importlib.util.find_spec("liger_kernel") is not None


@contextmanager
def as_on_gpu(tally: Tally, *, fused: bool) -> Iterator[None]:
    """Within it models without memory run what they would run on a GPU, counted by `tally`.

    `fused`: adapters as one op, as on a GPU, instead of PEFT's own layers.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch("cfa_kernels.hf.lora.is_on_gpu", return_value=fused))
        for target, stand_in in _PATCHED:
            stack.enter_context(mock.patch(target, stand_in))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", _attention(tally)))
        if has_liger():
            functions = importlib.import_module("liger_kernel.ops")
            for name, (results, kept) in _LIGER.items():
                stand_in = _one_kernel(tally, name, results, kept)
                stack.enter_context(mock.patch.object(getattr(functions, name), "apply", stand_in))
        yield


def _one_kernel(tally: Tally, name: str, results: int, kept: int) -> Any:
    """A function of tensors that counts one kernel forward and one backward, which reads inputs from `kept` on."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            inputs = [x for x in args if isinstance(x, Tensor)]
            ctx.save_for_backward(*inputs)
            ctx.places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
            ctx.count = len(args)
            out = tuple(torch.empty_like(x) for x in inputs[:results])
            tally.add(name, None, 0.0, nbytes([*inputs, *out]), out[0].dtype)
            return out if results > 1 else out[0]

        @staticmethod
        def backward(ctx: Any, *by_out: Any) -> Any:
            inputs = ctx.saved_tensors
            given = [torch.empty_like(x) if ctx.needs_input_grad[i] else None
                     for i, x in zip(ctx.places, inputs, strict=True)]  # fmt: skip
            made = [x for x in given if x is not None]
            tally.add(f"{name} backward", None, 0.0, nbytes([*inputs[kept:], *by_out, *made]), by_out[0].dtype)
            places = dict(zip(ctx.places, given, strict=True))
            return tuple(places.get(i) for i in range(ctx.count))

    return Kernel.apply


def _attention(tally: Tally) -> Any:
    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attention of every query to every key, the causal half of a prompt's; q (B, H, N, D)."""
        batch, heads, rows, width = query.shape
        pairs = batch * heads * rows * key.shape[2] * (0.5 if rows > 1 else 1.0)
        out = query.new_empty(batch, heads, rows, value.shape[3])
        moved = nbytes([query, key, value, out])
        tally.add("attention", ATTENTION, 2.0 * pairs * (width + value.shape[3]), moved, query.dtype)
        return out

    return attention
