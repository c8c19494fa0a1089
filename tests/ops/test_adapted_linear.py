"""Linear layers and their adapters as one op: the formula, its gradients, its rounding, its launches on a GPU."""

import pytest
import torch
from torch import nn

from cfa_kernels.ops import adapted_linear as operator
from cfa_kernels.ops import matmul
from cfa_kernels.ops.adapted_linear import AdaptedLayer, _AdaptedLinear, adapted_linear, split_adapters

HALF, FULL = torch.bfloat16, torch.float32


def wider(x, layers, scale):
    """The op for adapters of another dtype than the rows, whatever theirs are."""
    (parts,) = split_adapters([(layers, scale)], x.dtype)
    return _AdaptedLinear.apply(x, scale, parts, *(tensor for layer in layers for tensor in layer))


def by_columns(x, layers, scale):
    """The op in the graph of a layer whose adapters are columns of copies of its weights."""
    (parts,) = split_adapters([(layers, scale)], x.dtype, {})
    return adapted_linear(x, layers, scale, parts)


def one_by_one(x, layers, scale):
    """The formula, as PEFT computes it."""
    bases = [nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]
    added = [(x.to(layer.down.dtype) @ layer.down.t() @ layer.up.t()) * scale for layer in layers]
    return [(base + adapter).to(x.dtype) for base, adapter in zip(bases, added, strict=True)]


@pytest.mark.parametrize("trains", ["all", "adapter", "input", "one up"])
@pytest.mark.parametrize("biases", [(True,), (False,), (False, True, False)])
@pytest.mark.parametrize("op", [adapted_linear, wider])
def test_the_op_is_its_formula_and_passes_gradcheck(op, biases, trains):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, trained):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(trained)

    base, adapter = trains == "all", trains in ("all", "adapter")
    x = tensor(3, 5, trained=trains in ("all", "input"))
    tensors = []
    for width, bias in zip((4, 2, 4), biases, strict=False):
        tensors += [tensor(width, 5, trained=base), tensor(width, trained=base) if bias else None]
        tensors += [tensor(2, 5, trained=adapter), tensor(width, 2, trained=adapter)]
    tensors[-1].requires_grad_(trains != "input")

    def layers(flat):
        return [AdaptedLayer(*flat[i : i + 4]) for i in range(0, len(flat), 4)]

    expected = one_by_one(x, layers(tensors), 0.7)
    torch.testing.assert_close(list(op(x, layers(tensors), 0.7)), expected)
    torch.testing.assert_close(list(op(x.detach(), layers([t if t is None else t.detach() for t in tensors]), 0.7)),
                               [out.detach() for out in expected])  # fmt: skip
    torch.autograd.gradcheck(lambda x, *flat: tuple(op(x, layers(flat), 0.7)), (x, *tensors))


def problem(device, widths=(64,), rows=200, width=96, rank=8):
    """Rows of bfloat16, layers of bfloat16 whose float32 adapters count as much, and gradients of their results."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, width, generator=generator).to(HALF)
    by_outs = [torch.randn(rows, out, generator=generator).to(HALF) for out in widths]
    layers = [
        AdaptedLayer(
            (torch.randn(out, width, generator=generator) / width**0.5).to(HALF).to(device),
            None,
            (torch.randn(rank, width, generator=generator) / width**0.5).to(device),
            (torch.randn(out, rank, generator=generator) / rank**0.5).to(device),
        )
        for out in widths
    ]
    return x.to(device), layers, [by.to(device) for by in by_outs]


def gradients(op, x, layers, by_outs, dtype=None):
    to = [
        v.detach().clone().to(dtype or v.dtype).requires_grad_() for v in (x, *(v for one in layers for v in one[2:]))
    ]
    copies = [
        AdaptedLayer(one.weight.to(to[0].dtype), None, *to[1 + 2 * i : 3 + 2 * i]) for i, one in enumerate(layers)
    ]
    outs = op(to[0], copies, 0.5)
    return [*outs, *torch.autograd.grad(outs, to, [by.to(outs[0].dtype) for by in by_outs])]


@pytest.mark.parametrize("widths", [(64,), (64, 16, 16)])
def test_rounding_is_little_more_than_that_of_pefts_own_path_and_of_the_rows(widths, device):
    """Adapters here add as much as their layers, so rounding between the factors shows: sqrt(4 / 3) is expected."""
    tensors, count = problem(device, widths), len(widths)
    truth = gradients(one_by_one, *tensors, dtype=torch.float64)
    ours, theirs = (gradients(op, *tensors) for op in (adapted_linear, one_by_one))
    dtypes = [HALF] * (count + 1) + [FULL] * 2 * count
    assert [v.dtype for v in ours] == [v.dtype for v in theirs] == dtypes

    def errors(results):
        return [((v - t).norm() / t.norm()).item() for v, t in zip(results, truth, strict=True)]

    ours, theirs = errors(ours), errors(theirs)
    for mine, other in zip(ours[: count + 1], theirs[: count + 1], strict=True):  # results and gradient of the rows
        assert mine <= 1.25 * other < 2**-7
    assert max(ours[count + 1 :]) < 2**-8


@pytest.mark.parametrize("widths", [(64,), (64, 16, 16)])
def test_adapters_as_columns_of_the_weights_are_closer_to_the_truth(widths, monkeypatch, device):
    """A product and its adapter's are one sum, rounded once; gradients are the same to the bit."""
    tensors, count = problem(device, widths), len(widths)
    monkeypatch.setattr(operator, "is_compiling", lambda: True)
    truth = gradients(one_by_one, *tensors, dtype=torch.float64)
    ours, apart = (gradients(op, *tensors) for op in (by_columns, adapted_linear))
    for mine, other, true in zip(ours[:count], apart[:count], truth, strict=False):
        assert 0 < (mine - true).norm() < (other - true).norm()
    assert all(map(torch.equal, ours[count:], apart[count:]))


@pytest.mark.traced
def test_a_graph_may_split_the_adapters_itself(monkeypatch):
    """As layers in pieces do, whose adapters are whole only inside."""
    x, layers, _ = problem("cpu", (64, 16))
    graph = torch.compile(lambda x: adapted_linear(x, layers, 0.5), backend="eager", fullgraph=True)
    monkeypatch.setattr(matmul, "_has_onednn", lambda _: False)
    result = graph(x)
    monkeypatch.setattr(matmul, "is_compiling", lambda: True)
    assert all(map(torch.equal, result, adapted_linear(x, layers, 0.5)))


@pytest.mark.parametrize("factors", [([[1 + 2**-10], [1.0]], [[1.0, -1.0]]), ([[1.0], [1.0]], [[1 + 2**-10, -1.0]])])
def test_what_a_factor_loses_by_rounding_acts_on_the_rows(factors, device):
    down, up = (torch.tensor(factor, device=device) for factor in factors)
    layer = AdaptedLayer(torch.zeros(1, 1, dtype=HALF, device=device), None, down, up)
    (out,) = adapted_linear(torch.ones(3, 1, dtype=HALF, device=device), [layer], 0.5)
    assert out.tolist() == [[2**-11]] * 3
