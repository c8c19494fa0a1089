"""A linear layer and its adapter as one op: the formula, its gradients, its rounding, and what it moves on a GPU."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cfa_kernels.ops import matmul
from cfa_kernels.ops.adapted_linear import AdapterParts, _AdaptedLinear, adapted_linear
from tests.support.operator_calls import OperatorCalls

HALF, FULL = torch.bfloat16, torch.float32
NO_KERNELS = {"alias", "detach", "device", "empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"}


def wider(x, weight, shift, down, up, scale):
    """The op for an adapter of another dtype than the rows, whatever theirs are."""
    return _AdaptedLinear.apply(x, weight, shift, down, up, scale, AdapterParts.of(down, up, scale, x.dtype))


@pytest.mark.parametrize("trains", ["all", "adapter", "input"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", [adapted_linear, wider])
def test_the_op_is_its_formula_and_passes_gradcheck(op, bias, trains):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, trained):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(trained)

    base, adapter = trains == "all", trains != "input"
    x, weight = tensor(3, 5, trained=trains != "adapter"), tensor(4, 5, trained=base)
    shift = tensor(4, trained=base) if bias else None
    down, up = tensor(2, 5, trained=adapter), tensor(4, 2, trained=adapter)
    expected = x @ weight.t() + 0.7 * (x @ down.t()) @ up.t() + (0 if shift is None else shift)
    torch.testing.assert_close(op(x, weight, shift, down, up, 0.7), expected)
    torch.autograd.gradcheck(lambda *inputs: op(*inputs, 0.7), (x, weight, shift, down, up))


def layer(rows=200, width=96, out=64, rank=8):
    """Rows and gradient of bfloat16, a base layer of bfloat16, and an adapter of float32 that counts as much."""
    generator = torch.Generator().manual_seed(2)
    x, by_out = (torch.randn(rows, n, generator=generator).to(HALF) for n in (width, out))
    weight = (torch.randn(out, width, generator=generator) / width**0.5).to(HALF)
    down = torch.randn(rank, width, generator=generator) / width**0.5
    up = torch.randn(out, rank, generator=generator) / rank**0.5
    return x, by_out, weight, down, up


def gradients(op, x, by_out, weight, down, up, dtype=None):
    """The result of `op`, and its gradients by rows and adapter."""
    leaves = [v.detach().clone().to(dtype or v.dtype).requires_grad_() for v in (x, down, up)]
    out = op(leaves[0], weight.to(leaves[0].dtype), None, leaves[1], leaves[2], 0.5)
    return [out, *torch.autograd.grad(out, leaves, by_out.to(out.dtype))]


def as_peft(x, weight, bias, down, up, scale):
    base = nn.functional.linear(x, weight, bias)
    return (base + (x.to(down.dtype) @ down.t() @ up.t()) * scale).to(x.dtype)


def test_rounding_is_no_worse_than_that_of_pefts_own_path_and_adapters_keep_sixteen_bits():
    tensors = layer()
    truth = gradients(as_peft, *tensors, dtype=torch.float64)
    ours, theirs = (gradients(op, *tensors) for op in (adapted_linear, as_peft))
    assert [v.dtype for v in ours] == [v.dtype for v in theirs] == [HALF, HALF, FULL, FULL]

    def errors(results):
        return [((v - t).norm() / t.norm()).item() for v, t in zip(results, truth, strict=True)]

    (out, by_x, by_down, by_up), (their_out, their_by_x, *_) = errors(ours), errors(theirs)
    assert out <= 1.01 * their_out < 2**-7
    assert by_x <= 1.01 * their_by_x < 2**-7
    assert max(by_down, by_up) < 2**-15


def test_parts_made_before_give_the_result_of_parts_made_anew():
    x, _, weight, down, up = layer()
    out = adapted_linear(x, weight, None, down, up, 0.5, AdapterParts.of(down, up, 0.5, HALF))
    assert torch.equal(out, adapted_linear(x, weight, None, down, up, 0.5))


def test_no_rows_give_no_rows_and_gradients_of_nothing():
    _, _, weight, down, up = layer()
    out, by_x, by_down, by_up = gradients(
        adapted_linear, torch.zeros(0, 96, dtype=HALF), torch.zeros(0, 64), weight, down, up
    )
    assert out.shape == (0, 64)
    assert by_x.shape == (0, 96)
    assert not by_down.any()
    assert not by_up.any()


def kernels(operators: OperatorCalls) -> list[str]:
    """Names of the operators that launch a kernel."""
    names = [function._overloadpacket.__name__ for function, _ in operators.calls if not function.is_view]
    return [name for name in names if name not in NO_KERNELS]


@pytest.mark.traced
def test_kernels_of_a_forward_and_a_backward_on_a_gpu_are_no_more_than_pefts(monkeypatch):
    """The op's code for a GPU, on tensors that hold nothing."""
    monkeypatch.setattr(matmul, "_keeps_sums", lambda _: True)
    monkeypatch.setattr(matmul, "_has_onednn", lambda _: False)
    with FakeTensorMode():
        x, by_out, weight = (torch.empty(shape, dtype=HALF) for shape in ((1000, 64), (1000, 48), (48, 64)))
        leaves = [v.requires_grad_() for v in (x, torch.empty(4, 64), torch.empty(48, 4))]
        parts = AdapterParts.of(*leaves[1:], 0.5, HALF)
        with OperatorCalls() as forward:
            result = adapted_linear(x, weight, None, *leaves[1:], 0.5, parts)
        with OperatorCalls() as backward:
            torch.autograd.grad(result, leaves, by_out)
    assert kernels(forward) == ["mm", "add", "copy_", "sub", "mm", "addmm_"]
    assert kernels(backward) == ["mm", "add", "copy_", "sub", "mm", "addmm_", "mm", "add_", "mm", "add", "mul_"]
    base = nn.Sequential(nn.Linear(64, 48, bias=False, dtype=HALF))
    model = get_peft_model(base, LoraConfig(r=32, target_modules=["0"]))
    x = torch.empty(10, 64, dtype=HALF).requires_grad_()
    with OperatorCalls() as theirs:
        out = model(x)
        torch.autograd.grad(out, [x, *(p for p in model.parameters() if p.requires_grad)], torch.empty_like(out))
    assert len(kernels(forward) + kernels(backward)) <= len(kernels(theirs))
