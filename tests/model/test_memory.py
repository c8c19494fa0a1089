"""Smaller forwards take the place of one that a device has no memory for, to the same result."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cfa_kernels.estimators import gradient
from cfa_kernels.model import limits, memory, tree_forward
from cfa_kernels.model.check.verify import check_supported
from cfa_kernels.model.memory import run_in_memory
from cfa_kernels.model.walk import ModelWalk
from cfa_kernels.rows import Rows
from cfa_kernels.scoring import masked
from cfa_kernels.scoring.access import InProcess
from cfa_kernels.scoring.packed import packed_forward
from cfa_kernels.tree import attention
from tests.support.models import PLACEHOLDER, batch, batch_of, make_model, score_columns, score_forward, tokens


def drops(score, **options):
    return lambda model, *data: score(model, *data, **options).drop


def importances(estimate, **options):
    def values(model, *data):
        return estimate(InProcess(model), batch_of(model, *data), **options).values

    return values


def continued(model, prompts, completions, spans, answers):
    """The branches alone: the forward that they continue has had its memory."""
    forward = packed_forward(model, Rows(prompts, completions), keep_states=True)
    return score_forward(forward, spans, answers, mask=PLACEHOLDER).drop


CALLS = {
    "exact": drops(score_columns, mask=PLACEHOLDER),
    "continued": continued,
    "gradient": importances(gradient.Gradient(samples=2, sigma=0.01)),
}


@functools.cache
def model():
    made = make_model("Qwen3").cpu().double()  # whose rounding moves no draw from one token to the next
    check_supported(made)
    return made


@pytest.fixture
def device(monkeypatch):
    """A function that says when a forward, by its number and rows, runs out of memory; it gives their sizes."""
    forward, sizes = tree_forward.packed_hidden, []

    def limit(fails):
        def small_device(model, pack, **options):
            sizes.append(pack.table.num_rows)
            if fails(len(sizes), sizes[-1]):
                raise torch.OutOfMemoryError("pretend")
            return forward(model, pack, **options)

        for module in (tree_forward, masked, gradient):
            monkeypatch.setattr(module, "packed_hidden", small_device)
        return sizes

    return limit


def assert_same(ours, theirs):
    assert any(row.nan_to_num().abs().max() > 1e-6 for row in theirs if len(row))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("failing", [{1}, {2, 3}])
@pytest.mark.parametrize("name", CALLS)
def test_a_forward_that_runs_out_of_memory_is_done_in_smaller_ones_to_the_same_result(name, failing, device):
    expected = CALLS[name](model(), *batch())
    sizes = device(lambda number, _: number in failing)
    assert_same(CALLS[name](model(), *batch()), expected)
    if failing != {2, 3} or name == "gradient":  # which takes several forwards anyway
        assert len(sizes) > 2
        assert sizes[max(failing)] < sizes[0]


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_parted_is_an_error(name, device):
    sizes = device(lambda *_: True)
    with pytest.raises(torch.OutOfMemoryError, match="pretend"):
        CALLS[name](model(), *batch())
    assert sizes == sorted(sizes, reverse=True)


MESSAGES = {
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": True,
    "Triton Error [CUDA]: out of memory": True, "CUDA error: out of memory": True,
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes": True,
    "out of resource: shared memory": False, "wrong shape": False,
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_a_device_without_memory_is_known_by_every_message_that_it_gives(message):
    def run(work):
        if len(work) > 1:
            raise RuntimeError(message)
        return work

    with nullcontext() if MESSAGES[message] else pytest.raises(RuntimeError, match=message):
        assert list(run_in_memory(["ab"], run, list)) == ["a", "b"]


def test_memory_of_a_training_forward_is_estimated_within_its_measure_and_a_third_more(monkeypatch, unchecked):
    monkeypatch.setattr(attention, "_HALVES", ())  # as on a GPU, whose attention keeps its operands as they are
    (prompt,), (completion,) = tokens(8), tokens(93, seed=1)

    def made(layers):
        shape = {"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
        return make_model("Qwen3", **shape).cpu().to(torch.bfloat16).train()

    def measured(model):
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes(), tensor  # which keeps the address from being used again
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            forward = packed_forward(model, Rows([prompt], [completion]))
        return sum(size for size, _ in saved.values()) / forward.tokens_fed

    def kept(model):
        return limits.kept_per_row(ModelWalk.of(model))

    one, two = made(1), made(2)
    estimate, measure = kept(two) - kept(one), measured(two) - measured(one)
    assert measure <= estimate <= 4 / 3 * measure
    own = kept(two)
    monkeypatch.setattr(type(two).forward, "__module__", "liger_kernel.transformers")
    assert kept(two) < own


BOTH = {-3: 1 << 28, -1: 1 << 30}


@pytest.mark.parametrize(
    ("most", "environment", "kept"),
    [
        (1 << 40, {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, BOTH),
        (1 << 25, {}, {**BOTH, -3: 1 << 25}),
        (0, {}, {}),
        (1 << 40, {"MALLOC_MMAP_THRESHOLD_": "65536"}, {}),
        (1 << 40, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"}, {}),
    ],
)
def test_a_limit_of_memory_that_stays_is_set_with_one_of_blocks_and_none_over_the_users(
    most, environment, kept, monkeypatch
):
    """The second by itself holds the first at 128 KB; old glibc refuses more than 32 MB of the first."""
    limits = {}

    def mallopt(name, value):
        accepts = name != -3 or value <= most
        limits.update({name: value} if accepts else {})
        return int(accepts)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    memory.keep_freed_memory()
    assert limits == kept
