"""TF32 as torch may be set to: the check of a model does without, and what of the losses follows it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cfa_kernels.model.check import verify
from cfa_kernels.ops.matmul import ieee_products
from tests.support.models import make_model

WAYS = {
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "cuda.matmul.fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "fp32_precision": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}
KEYS = [(backend, op) for backend in ("generic", "cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]


def answer(question: Any) -> Any:
    """The answer, or that torch refuses to give one where its two ways to set it were mixed."""
    try:
        return question()
    except RuntimeError:
        return "mixed"


def settings() -> list[Any]:
    known = [torch._C._get_fp32_precision_getter(*key) for key in KEYS if key[0] != "generic" or key[1] == "all"]
    return [*known, answer(torch.get_float32_matmul_precision), answer(lambda: torch.backends.cuda.matmul.allow_tf32)]


def reset() -> None:
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"


@pytest.fixture(autouse=True)
def torchs_own_setting() -> Iterator[None]:
    reset()  # of what a host's arguments have set before
    before = settings()
    yield
    reset()
    assert settings() == before


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Numbers as a tensor core takes them: 10 bits of a float32's 23, if that is allowed."""
    if x.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).view_as(x)


class LikeTensorCores(TorchDispatchMode):
    """The products that a model's own modules ask for, as a GPU makes them under torch's setting."""

    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.products:
            args = [*args[:-2], *(to_tf32(x) for x in args[-2:])]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_ieee_products_come_and_go_whichever_way_torch_was_set(way):
    WAYS[way]()
    before = settings()
    with ieee_products():
        assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.allow_tf32 is False
    assert settings() == before
    with pytest.raises(KeyError), ieee_products():
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize("way", ["set_float32_matmul_precision", "cuda.matmul.fp32_precision"])
def test_a_model_is_checked_where_tf32_is_allowed(way):
    model = make_model("Qwen3", num_hidden_layers=2)
    WAYS[way]()
    before = settings()
    with LikeTensorCores():
        verify.check_supported(model)
        assert settings() == before
        model.forward = lambda **_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            verify.check_supported(model)
    assert settings() == before
