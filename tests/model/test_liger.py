"""A model to which its owner has applied Liger passes the check and trains on packed trees as it does without.

Without a GPU Liger's kernels run in Triton's interpreter, which lacks a few things that they use.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from peft import LoraConfig, get_peft_model
from transformers.integrations.liger import apply_liger_kernel
from triton.runtime import JITFunction, interpreter

from cfa_kernels import check_model, packed_logprobs
from cfa_kernels.model.check.verify import check_trainable
from cfa_kernels.model.parts import causal_lm
from cfa_kernels.ops.dispatch import interpreting
from cfa_kernels.ops.triton_math import tanh
from cfa_kernels.rows import Rows
from tests.support.models import SMALL_ROWS, assert_same_gradients, gradients, make_model

# Checkpoints compare devices, which the stand-in for a GPU gives another name.
pytestmark = [pytest.mark.slow, pytest.mark.traced]


@triton.jit
def rsqrt(x):
    return 1.0 / tl.sqrt(x)


class _Number(float):
    """A scalar argument, which a compiled kernel may cast."""

    def to(self, _: object) -> "_Number":
        return self  # float32 is all that these kernels run in here


@contextmanager
def liger_kernels() -> Iterator[list[str]]:
    """Yield the names of Triton's kernels as they run; what Liger exchanges in transformers' files comes back."""
    from liger_kernel.ops import geglu, rms_norm

    ran: list[str] = []
    kernel = interpreter.InterpretedFunction if interpreting() else JITFunction
    convert, run = interpreter._implicit_cvt, kernel.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if interpreting():
            patch.setattr(interpreter, "_implicit_cvt", lambda x: _Number(x) if isinstance(x, float) else convert(x))
            patch.setattr(rms_norm, "rsqrt", rsqrt)
            patch.setattr(geglu, "tanh", tanh)
        files = [module for name, module in sys.modules.items() if ".modeling_" in name]
        before = [dict(vars(file)) for file in files]
        patch.setattr(kernel, "run", noted)
        try:
            yield ran
        finally:
            for file, names in zip(files, before, strict=True):
                vars(file).update(names)


def adapted(name, liger, **checkpointing):
    """Adapters inside the attention and the gated MLP, off the identity they start as."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # a program of a norm for each
    model = make_model(name, num_hidden_layers=1, hidden_size=32, intermediate_size=48, **heads)
    if liger is not None:
        apply_liger_kernel(model, liger)
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model.train()


def gradients_of_packed_rows(model):
    return gradients(model, sum(row.square().sum() for row in packed_logprobs(model, Rows(*SMALL_ROWS))))


@pytest.mark.parametrize(
    ("name", "options", "gate", "checkpointing", "check"),
    [
        # Liger's loss in the model's forward, as by default
        ("Qwen3", {}, "swiglu", {"use_reentrant": False}, check_model),
        ("Gemma2", {"fused_linear_cross_entropy": False}, "geglu_tanh", {}, check_trainable),
    ],
)
def test_a_model_with_ligers_modules_is_checked_and_its_gradients_are_those_without(
    name, options, gate, checkpointing, check
):
    expected = gradients_of_packed_rows(adapted(name, None))
    with liger_kernels() as ran:
        model = adapted(name, options, **checkpointing)
        check(causal_lm(model))
        assert {"_rms_norm_forward_kernel", "_triton_rope", f"_{gate}_forward_kernel"} <= set(ran)
        ran.clear()
        ours = gradients_of_packed_rows(model)
    assert f"_{gate}_backward_kernel" in ran
    assert ran.count(f"_{gate}_forward_kernel") == (2 if checkpointing else 1)
    assert_same_gradients(ours, expected, 1e-5)
