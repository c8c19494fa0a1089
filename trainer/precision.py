"""Decide the arithmetic of a run: its device, the type of its weights and that of their products."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cfa_kernels.ops.matmul import cpu_multiplies_bfloat16


@dataclass(frozen=True)
class Precision:
    """Arithmetic of a run, chosen by `Precision.of`."""

    device: torch.device
    weights: torch.dtype  # as they are kept and, if they train, updated
    products: torch.dtype  # what a forward multiplies matrices in

    @classmethod
    def of(cls, dtype: str, device: str, *, adapters: bool) -> "Precision":
        """Choose what `--dtype` and `--device` name.

        Weights that train stay float32: a step of AdamW is smaller than the gap between neighbouring bfloat16 numbers.
        """
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        where = torch.device(device)
        on_gpu = where.type == "cuda"
        if dtype == "auto" and adapters and (on_gpu or (where.type == "cpu" and cpu_multiplies_bfloat16())):
            dtype = "bfloat16"
        if dtype == "auto":
            dtype = "mixed" if on_gpu else "float32"
        weights = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        return cls(where, weights, torch.float32 if dtype == "float32" else torch.bfloat16)

    @property
    def is_mixed(self) -> bool:
        """Whether products are rounded more than the weights are."""
        return self.weights != self.products

    def autocast(self) -> torch.autocast:
        """Make the context of a forward and all that is computed from it, but not of its backward; off unless mixed."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed)


def rounding(dtype: torch.dtype) -> float:
    """Return the nats by which rounding may move log-probs between sampling and a forward of whole rows."""
    # Several times the means of models of 4 to 24 layers: float32 6e-6, bfloat16 0.07, adapters merged or not.
    return {torch.float64: 0.02, torch.float32: 0.02, torch.float16: 0.05}.get(dtype, 0.3)


def require_device(device: torch.device) -> None:
    """Raise `ValueError` unless a number can be put on the device and read from it."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as problem:  # the latter of a PyTorch that was built without CUDA
        raise ValueError(f"device: {device} cannot be used: {str(problem).partition(chr(10))[0]}") from problem


def frozen_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy a model, frozen, with its parameters in `dtype`; buffers, such as rotary frequencies, keep theirs."""
    own: dict[int, Any] = {}  # what `deepcopy` finds it need not copy
    if dtype is not None:
        plain = [p for p in model.parameters() if type(p) is nn.Parameter and p.is_floating_point()]
        own = {id(p): nn.Parameter(p.detach().to(dtype, copy=True)) for p in plain}
    return copy.deepcopy(model, own).requires_grad_(False)
