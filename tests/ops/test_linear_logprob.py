"""Target log-probs under a linear head: PyTorch and Triton forms against float64, gradients, operators, errors."""

import math

import pytest
import torch

from cfa_kernels.ops.kept_tokens import KeptTokens
from cfa_kernels.ops.linear_logprob import (
    linear_logprob,
    linear_logprob_backward_op,
    linear_logprob_op,
    linear_logprob_reference,
    linear_logprob_triton,
)
from cfa_kernels.ops.row_softmax import Softmax
from tests.support.budget import assert_within_budget
from tests.support.operator_calls import OperatorCalls
from tests.support.policy_problem import on_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["torch", "triton"]
SHAPES = [(1, 1, 1), (3, 8, 64), (33, 50, 200), (70, 33, 131)]  # rows, width, vocabulary
TRANSFORMS = [
    {}, {"temperature": 0.6}, {"bias": True, "softcap": 5.0},
    {"bias": True, "softcap": 3.0, "logit_scale": 0.3, "temperature": 1.7},
]  # fmt: skip
TILES = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "WIDEN": True, "num_warps": 4, "num_stages": 2}


def example(shape, device, dtype=torch.float32, *, bias=False, seed=0, spread=1.0, **transform):
    """(hidden, lm_head, targets) and the keyword arguments of linear_logprob; targets include 0 and V - 1."""
    n, width, vocabulary = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=generator).mul(spread).to(device, dtype)
    lm_head = torch.randn(vocabulary, width, generator=generator).to(device, dtype)
    targets = torch.randint(vocabulary, (n,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    if bias:
        transform["bias"] = torch.randn(vocabulary, generator=generator).to(device, dtype)
    return (hidden, lm_head, targets.to(device)), transform


def plain(hidden, lm_head, targets, dtype, **options):
    """Log-probs and entropies from the whole logits, everything in `dtype`."""
    return from_logits(hidden.to(dtype) @ lm_head.to(dtype).T, targets, **options)


def from_logits(logits, targets, *, bias=None, temperature=1.0, softcap=None, logit_scale=1.0):
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(1)
    entropy = -torch.where(logp > -math.inf, logp.exp() * logp, 0).sum(1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def assert_within_budget_of_float32(values, inputs, **options):
    low, exact = (plain(*inputs, dtype, **options) for dtype in (torch.float32, torch.float64))
    for value, single, double in zip(values, low, exact, strict=True):
        assert_within_budget(value, single, double, scale=1.0)  # of one token both are 0


def assert_close_to_rounding(ours, expected):
    """Equal but for the order of sums, which the host's libraries choose by threads, layout and processor."""
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "transform"),
    [
        *((SHAPES[2], torch.float32, transform) for transform in TRANSFORMS),
        *((SHAPES[2], dtype, TRANSFORMS[-1]) for dtype in (torch.bfloat16, torch.float16)),
        *((shape, dtype, TRANSFORMS[-1]) for shape in SHAPES[:2] for dtype in (torch.float32, torch.bfloat16)),
        *((SHAPES[3], dtype, {}) for dtype in (torch.float32, torch.bfloat16)),
        ((6, 3, 3000), torch.float32, {}),  # several blocks of the PyTorch form
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logprob_and_entropy_are_within_the_budget_of_float32(
    backend, dtype, shape, transform, device, poisoned_memory
):
    """Half-precision inputs too: their products, sums and logits are float32."""
    inputs, keywords = example(shape, device, dtype, **transform)
    ours = linear_logprob(*inputs, return_entropy=True, backend=backend, **keywords)
    assert [value.dtype for value in ours] == [torch.float32] * 2
    assert_within_budget_of_float32(ours, inputs, **keywords)
    assert_close_to_rounding(linear_logprob(*inputs, backend=backend, **keywords), ours[0])


@pytest.mark.parametrize(
    ("tma", "flatten", "dtype", "shift"),
    [
        (False, False, torch.float32, 0.0), (True, True, torch.float32, 0.0),
        (False, False, torch.bfloat16, -1000.0), (False, True, torch.float32, -1000.0),
        (True, False, torch.float16, -1000.0), (True, True, torch.float32, -1000.0),
    ],
)  # fmt: skip
def test_each_kind_of_launch_gives_the_same_logprobs(dtype, tma, flatten, shift, device, poisoned_memory):
    """Pointers or descriptors, one tile a program or many: rows of 48 elements are aligned for both.

    A phantom logit of 0 behind the vocabulary would take all the probability from logits near -1000.
    """
    if device.type == "cuda" and tma and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("the tensor memory accelerator came with sm_90")
    inputs, _ = example((37, 48, 203), device, dtype)
    bias = torch.full((203,), shift, device=device)
    options = TILES | {"TMA": tma, "FLATTEN": flatten, "WIDEN": device.type == "cpu"}
    rows = linear_logprob_triton(*inputs, bias if shift else None, Softmax(), True, options)
    assert_within_budget_of_float32(rows, inputs, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nearly_certain_target_is_never_more_than_certain(dtype, device):
    """Its logit is not multiplied by the routine that the sum over the vocabulary is made of."""
    (hidden, lm_head, _), _ = example((40, 50, 200), device, dtype, spread=8.0)
    targets = (hidden.double() @ lm_head.double().T).argmax(1)
    ours = linear_logprob(hidden, lm_head, targets, backend="triton")
    expected, _ = plain(hidden, lm_head, targets, torch.float64)
    assert (ours <= 0).all()
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-4)  # logits of some hundreds, rounded
    assert (expected > -1e-6).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_ten_thousand_neither_overflow_nor_lose_the_small_differences(backend, device):
    """Integers, so that float32 logits are exact: log-probs must be too, at any common shift; the last is certain."""
    logits = [[10_000.0, 9_999.0, 9_990.0], [-10_000.0, -10_001.0, -10_003.0], [0.0, 300.0, 0.0]]
    inputs = (torch.tensor(logits, device=device), torch.eye(3, device=device), torch.tensor([1, 2, 1], device=device))
    ours = linear_logprob(*inputs, return_entropy=True, backend=backend)
    for value, exact in zip(ours, plain(*inputs, torch.float64), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=0, atol=1e-6)
        assert value[2] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_minus_infinity_have_no_probability(backend, device, poisoned_memory):
    """A whole tile of banned tokens, and a banned target."""
    (hidden, lm_head, targets), _ = example((6, 16, 200), device)
    bias = torch.zeros(200, device=device)
    bias[:130] = -math.inf
    targets[:] = torch.arange(6) + 127
    ours = linear_logprob(hidden, lm_head, targets, bias=bias, return_entropy=True, backend=backend)
    for value, expected in zip(ours, plain(hidden, lm_head, targets, torch.float64, bias=bias), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    assert (ours[0] == -math.inf).tolist() == [True] * 3 + [False] * 3


def example_of_exact_logits(shape, device, dtype=torch.float32):
    """Small integers, whose products and sums are exact in any order, so that a host's BLAS decides nothing.

    Sums of exponentials are not: they show in which order the kernels added.
    """
    (hidden, lm_head, targets), _ = example(shape, device)
    hidden, lm_head = (tensor.round().clamp(-2, 2).to(dtype) for tensor in (hidden, lm_head))
    bias = (torch.arange(len(lm_head), device=device) % 5).to(dtype)
    return (hidden, lm_head, targets), {"bias": bias, "temperature": 3.0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_in_any_batch_and_in_launches_that_are_cut(dtype, device, monkeypatch):
    inputs, keywords = example_of_exact_logits((70, 40, 150), device, dtype)
    keywords |= {"return_entropy": True, "backend": "triton"}
    hidden, lm_head, targets = inputs
    whole = torch.stack(linear_logprob(*inputs, **keywords))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).to(device)
    for rows in (order, order[:31], order[5:6]):
        part = linear_logprob(hidden[rows], lm_head, targets[rows], **keywords)
        assert torch.equal(torch.stack(part), whole[:, rows])
    monkeypatch.setattr("cfa_kernels.ops.linear_logprob.STATISTICS_ROWS", 21)
    assert torch.equal(torch.stack(linear_logprob(*inputs, **keywords)), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_rows_and_targets_do_not_matter(backend, device):
    (hidden, lm_head, targets), _ = example_of_exact_logits((9, 16, 100), device)
    expected = linear_logprob(hidden, lm_head, targets, backend=backend)
    wide = torch.full((9, 40), math.nan, device=device)
    wide[:, 7:23] = hidden
    head = torch.full((200, 16), math.nan, device=device)
    head[::2] = lm_head
    spaced = torch.zeros(18, dtype=torch.int32, device=device)
    spaced[::2] = targets
    assert_close_to_rounding(linear_logprob(wide[:, 7:23], head[::2], spaced[::2], backend=backend), expected)
    repeated = linear_logprob(hidden[:1].expand(4, 16), lm_head, targets[:1].expand(4), backend=backend)
    assert_close_to_rounding(repeated, expected[:1].expand(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_no_logprobs_and_zero_gradients(backend, dtype, device):
    hidden = torch.empty(0, 8, device=device, dtype=dtype, requires_grad=True)
    lm_head = torch.randn(5, 8, device=device, dtype=dtype, requires_grad=True)
    targets = torch.empty(0, dtype=torch.long, device=device)
    logprob, entropy = linear_logprob(hidden, lm_head, targets, return_entropy=True, backend=backend)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert torch.equal(lm_head.grad, torch.zeros_like(lm_head))
    assert hidden.grad.shape == hidden.shape


def test_autocast_casts_hidden_and_head_as_for_a_linear_layer_and_leaves_a_backward_alone(device):
    inputs, _ = example((5, 16, 40), device)
    halves = (inputs[0].bfloat16(), inputs[1].bfloat16(), inputs[2])
    hidden = inputs[0].clone().requires_grad_()
    plain = linear_logprob(hidden, *inputs[1:])
    (expected,) = torch.autograd.grad(plain.sum(), hidden, retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours = linear_logprob(*inputs)
        wide = linear_logprob(inputs[0].double(), inputs[1].double(), inputs[2], backend="torch")
        (gradient,) = torch.autograd.grad(plain.sum(), hidden)
    assert_close_to_rounding(ours, linear_logprob(*halves))
    assert (ours - plain).abs().max() > 1e-3
    assert wide.dtype == torch.float64
    assert_close_to_rounding(gradient, expected)


def gradients(inputs, keywords, by_logprob, by_entropy, backend=None):
    """Gradients by hidden, lm_head and bias of the sum of weighted log-probs and entropies; of `plain` without one."""
    leaves = {"hidden": inputs[0], "lm_head": inputs[1]} | {n: x for n, x in keywords.items() if n == "bias"}
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    arguments = {"targets": inputs[2], **keywords, **leaves}
    if backend is None:
        logprob, entropy = plain(dtype=inputs[0].dtype, **arguments)
    else:
        logprob, entropy = linear_logprob(return_entropy=True, backend=backend, **arguments)
    ((logprob * by_logprob.to(logprob)).sum() + (entropy * by_entropy.to(entropy)).sum()).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def in_float64(inputs):
    return inputs[0].double(), inputs[1].double(), inputs[2]


@pytest.mark.parametrize(
    ("dtype", "transform", "strip_rows"),
    [
        (torch.float32, {}, None), (torch.float32, TRANSFORMS[-1], 17), (torch.bfloat16, TRANSFORMS[-1], 17),
        (torch.float16, {}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_within_the_budget(backend, dtype, transform, strip_rows, device, monkeypatch, poisoned_memory):
    shape = (33, 24, 131)
    if strip_rows is not None:
        sizes = dict.fromkeys(("cpu", "cuda"), strip_rows * shape[2] * 4)
        monkeypatch.setattr("cfa_kernels.ops.linear_logprob.STRIP_BYTES", sizes)
    inputs, keywords = example(shape, device, dtype, **transform)
    generator = torch.Generator().manual_seed(2)
    by_logprob, by_entropy = torch.randn(2, shape[0], generator=generator).to(device)
    by_logprob[3] = by_entropy[3] = 0
    ours = gradients(inputs, keywords, by_logprob, by_entropy, backend)
    low = gradients(inputs, keywords, by_logprob, by_entropy)
    exact = {name: value.double() for name, value in keywords.items() if name == "bias"}
    double = gradients(in_float64(inputs), keywords | exact, by_logprob, by_entropy)
    for name, value in ours.items():
        assert value.dtype == dtype
        assert_within_budget(value, low[name], double[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_tiny_weights_survive_float16(backend, device):
    """A mean over 10^5 rows: without a common factor, gradients by logits would underflow."""
    inputs, _ = example((4, 16, 1000), device, torch.float16, spread=4.0)
    tiny = torch.full((4,), 1e-5, device=device)
    hidden = inputs[0].clone().requires_grad_()
    linear_logprob(hidden, *inputs[1:], backend=backend).backward(tiny)
    exact = gradients(in_float64(inputs), {}, tiny, 0 * tiny)["hidden"]
    assert exact.abs().max() < 1e-4
    torch.testing.assert_close(hidden.grad.double(), exact, rtol=2e-3, atol=2**-24)


def test_a_second_derivative_is_refused(device):
    inputs, _ = example((3, 4, 9), device)
    hidden = inputs[0].requires_grad_()
    (gradient,) = torch.autograd.grad(linear_logprob(hidden, *inputs[1:]).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_logprob_backward"):
        gradient.sum().backward()


@pytest.mark.parametrize(("backend", "kept"), [("torch", (None, None)), ("triton", KeptTokens.of([range(40)] * 6)[:2])])
def test_the_operators_pass_opcheck(backend, kept, device):
    (hidden, lm_head, targets), keywords = example((6, 8, 40), device, bias=True)
    leaves = [leaf.requires_grad_() for leaf in (hidden, lm_head, keywords["bias"])]
    arguments = (leaves[0], leaves[1], targets, leaves[2], *kept, 0.7, 2.0, True, backend)
    torch.library.opcheck(linear_logprob_op, arguments)
    rows = linear_logprob_op(*arguments)
    for wanted in ([True, True, True], [True, False, False]):
        torch.library.opcheck(
            linear_logprob_backward_op,
            (torch.randn_like(rows), hidden.detach(), lm_head.detach(), targets, keywords["bias"].detach(),
             *kept, 0.7, 2.0, True, wanted, backend), test_utils=["test_schema", "test_faketensor"],
        )  # fmt: skip


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_pytorch_form_never_holds_the_logits_either(with_entropy):
    (hidden, lm_head, targets), _ = example((2000, 4, 9000), torch.device("cpu"))
    with OperatorCalls() as operators:
        linear_logprob_reference(hidden, lm_head, targets, None, Softmax(), with_entropy)
    assert 0 < max(size for _, size in operators.calls) < 2000 * 9000 / 5


GOOD = dict(zip(("hidden", "lm_head", "bias"), map(torch.zeros, ((3, 4), (5, 4), (5,))), strict=True))
GOOD["targets"] = torch.tensor([0, 1, 4])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"targets": torch.tensor([0, 5, -1])}, ValueError, r"targets\[1\] must be in \[0, 5\), got 5"),
        ({"targets": torch.tensor([0, 1])}, ValueError, r"targets must be \(3,\)"),
        ({"targets": torch.tensor([0.0, 1, 2])}, TypeError, "targets must be integers, got torch.float32"),
        ({"hidden": torch.zeros(2, 3, 4)}, ValueError, "hidden must have 2 dimensions"),
        ({"hidden": torch.zeros(3, 6)}, ValueError, r"lm_head must be \(5, 6\)"),
        ({"hidden": torch.zeros(4, 3).T}, ValueError, "hidden must be contiguous in its last dimension"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "hidden must be one of"),
        ({"lm_head": torch.zeros(4, 5).T}, ValueError, "lm_head must be contiguous in its last dimension"),
        ({"lm_head": torch.zeros(5, 4, dtype=torch.float16)}, TypeError, "lm_head must have hidden's dtype"),
        ({"lm_head": torch.zeros(5, 4, device="meta")}, ValueError, "lm_head must be on hidden's device cpu"),
        ({"lm_head": torch.nn.Linear(4, 5)}, ValueError, "lm_head must be of class Tensor, got Linear"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must be \(5,\)"),
        ({"temperature": 0.0}, ValueError, r"temperature must be in \[1e-38, 1e38\], got 0.0"),
        ({"temperature": None}, ValueError, r"temperature must be in \[1e-38, 1e38\], got None"),
        ({"logit_scale": math.nan}, ValueError, r"logit_scale must be in \[.*\], got nan"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(wrong, error, message):
    with pytest.raises(error, match=message):
        linear_logprob(**(GOOD | wrong))


@on_gpu
def test_a_target_outside_the_vocabulary_gives_nan_without_waiting_for_the_device(device):
    inputs, _ = example((4, 64, 1000), device, torch.bfloat16)
    inputs[2][:] = torch.tensor([-1, 1000, 5, 2**40])
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = linear_logprob(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert ours.isnan().tolist() == [True, True, False, True]


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [512, 500, 2048])
def test_on_a_gpu_a_row_gives_the_same_bits_for_any_number_of_rows(dtype, width, device):
    inputs, _ = example((5000, width, 33_003), device, dtype)
    hidden, lm_head, targets = inputs
    whole = torch.stack(linear_logprob(*inputs, return_entropy=True))
    single, double = (plain(hidden[:64], lm_head, targets[:64], kind) for kind in (torch.float32, torch.float64))
    if dtype != torch.float32:  # tensor cores cut sums off towards zero where others round
        single = from_logits(torch.mm(hidden[:64], lm_head.T, out_dtype=torch.float32), targets[:64])
    for value, low, high in zip(whole[:, :64], single, double, strict=True):
        assert_within_budget(value, low, high)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 116), slice(0, 128), slice(1, 130), slice(2000, 5000)):
        part = linear_logprob(hidden[rows], lm_head, targets[rows], return_entropy=True)
        assert torch.equal(torch.stack(part), whole[:, rows])


@on_gpu
@pytest.mark.parametrize("many", ["head", "hidden"])
def test_on_a_gpu_offsets_beyond_two_to_the_31_are_right(many, device):
    rows, vocabulary, width = (40, 262_147, 8448) if many == "head" else (262_147, 40, 8448)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device, dtype=torch.bfloat16) / 64
    lm_head = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16)
    assert max(hidden.numel(), lm_head.numel()) > 2**31
    targets = torch.arange(rows, device=device) % vocabulary
    targets[-1] = vocabulary - 1
    ours = linear_logprob(hidden, lm_head, targets)
    last = slice(rows - 40, rows)
    theirs = linear_logprob(*in_float64((hidden[last], lm_head, targets[last])), backend="torch")
    torch.testing.assert_close(ours[last].double(), theirs, rtol=1e-5, atol=1e-4)
