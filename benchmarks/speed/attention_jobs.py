"""Attention along trees as a kernel's job: q, k, v of a pack, contenders for it and its gradients, and the truth."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.race import Contender
from benchmarks.harness.workloads import MODELS, SEED, Job, head_dim, random_model
from benchmarks.speed.reference import ErrorBudget, ErrorBudgets
from cfa_kernels import Batch, Rows
from cfa_kernels.scoring.plan import plan_scoring
from cfa_kernels.tree.attention import tree_attention
from cfa_kernels.tree.segment_table import SegmentTable

OURS = "ours"
FLASH, DEFAULT = "flash attention, equal lengths", "SDPA's own choice, equal lengths"


@dataclass(frozen=True)
class AttentionJob:
    """q (N, H, D), k and v (N, Hkv, D) of one pack, and the keys that each segment sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: SegmentTable
    gathered: Tensor  # key rows of every segment, one segment after the other
    ends: tuple[Tensor, Tensor]  # (S + 1,) int32 of queries and of gathered keys

    @property
    def flops(self) -> float:
        return self._flops(self.table.visible_pairs())

    @property
    def flash_shape(self) -> tuple[int, int]:
        """Find the number and length of causal sequences with about as many tokens and visible pairs as the trees."""
        length = max(round(2 * self.table.visible_pairs() / self.table.num_rows) - 1, 1)
        return max(round(self.table.num_rows / length), 1), length

    def describe(self) -> dict[str, int]:
        """Sizes, for the record."""
        batch, length = self.flash_shape
        return {
            "rows": self.table.num_rows,
            "segments": len(self.table.length),
            "visible_pairs": self.table.visible_pairs(),
            "flash_batch": batch,
            "flash_length": length,
            "seed": SEED,
        }

    @property
    def flash_flops(self) -> float:
        batch, length = self.flash_shape
        return self._flops(batch * length * (length + 1) / 2)

    def _flops(self, pairs: float) -> float:
        """Count the operations of QK^T and PV."""
        return 4.0 * self.q.shape[1] * self.q.shape[2] * pairs


def make_attention_job(name: str, dtype: torch.dtype, job: Job, device: torch.device) -> AttentionJob:
    """The attention of a model's heads along the trees of a job."""
    config = MODELS[name]
    model = random_model(name, device=torch.device("meta"), dtype=dtype)
    rows = Rows(job.prompts, job.completions)
    batch = Batch(rows, units=job.spans, answers=job.answers, placeholder=job.placeholder_id, token_budget=2**31)
    (pack,) = plan_scoring(model, batch).packs()
    table, generator = pack.table, torch.Generator(device).manual_seed(SEED)
    q, k, v = (
        torch.randn(table.num_rows, count, head_dim(config), generator=generator, device=device).to(dtype)
        for count in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    rows = []
    for first, length, start, context in zip(
        table.row_start, table.length, table.context_start, table.context_length, strict=True
    ):
        rows += [table.context_rows[start : start + context], np.arange(first, first + length, dtype=np.int32)]
    ends = [np.append(0, np.cumsum(lengths)) for lengths in (table.length, table.length + table.context_length)]
    on_device = [torch.from_numpy(array.astype(np.int32)).to(device) for array in (np.concatenate(rows), *ends)]
    return AttentionJob(q, k, v, table, on_device[0], (on_device[1], on_device[2]))


def ours_attention(job: AttentionJob) -> Tensor:
    return tree_attention(job.q, job.k, job.v, job.table)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, heads, length, D), by the backend that PyTorch chooses: on some GPUs cuDNN's."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`sdpa`, on a GPU by flash attention and nothing else."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return sdpa(q, k, v)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`sdpa` by explicit softmax."""
    with sdpa_kernel([SDPBackend.MATH]):
        return sdpa(q, k, v)


def along_each_segment(job: AttentionJob, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each segment to the keys gathered for it, by explicit softmax: what is right."""
    out = torch.empty_like(q)
    first, ends = (x.tolist() for x in job.ends)
    for rows, keys in zip(itertools.pairwise(first), itertools.pairwise(ends), strict=True):
        seen = job.gathered[slice(*keys)]
        own, count = q[slice(*rows)], len(seen)
        hidden = torch.ones(len(own), count, dtype=torch.bool, device=q.device).triu(1 + count - len(own))
        wide = [x[seen].repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)]
        scores = torch.einsum("qhd,khd->hqk", own, wide[0]) * q.shape[2] ** -0.5
        weights = scores.to(wide_dtype(scores)).masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
        out[slice(*rows)] = torch.einsum("hqk,khd->qhd", weights, wide[1])
    return out


def equal_sequences(job: AttentionJob) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (batch, heads, length, D) of `flash_shape`."""
    batch, length = job.flash_shape
    generator = torch.Generator(job.q.device).manual_seed(SEED)
    q, k, v = (
        torch.randn(batch, x.shape[1], length, x.shape[2], generator=generator, device=x.device).to(x.dtype)
        for x in (job.q, job.k, job.v)
    )
    return q, k, v


def attention_contenders(job: AttentionJob) -> list[Contender]:
    tree = ErrorBudget.of(functools.partial(along_each_segment, job), job.q, job.k, job.v)
    shape = equal_sequences(job)
    equal = ErrorBudget.of(plain, *(x[:1] for x in shape))
    return [
        Contender(OURS, functools.partial(ours_attention, job), tree.check),
        Contender(FLASH, functools.partial(flash, *shape), lambda out: equal.check(out[:1])),
        Contender(DEFAULT, functools.partial(sdpa, *shape), lambda out: equal.check(out[:1])),
    ]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# Gradients

Gradients = tuple[Tensor, ...]
"""By q, k and v."""


def gradients_along_each_segment(job: AttentionJob, by_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Gradients of `along_each_segment`, a segment at a time: its weights as a whole would not fit."""
    result = tuple(torch.zeros_like(x, dtype=wide_dtype(x)) for x in (q, k, v))
    first, ends = (x.tolist() for x in job.ends)
    for rows, keys in zip(itertools.pairwise(first), itertools.pairwise(ends), strict=True):
        seen = job.gathered[slice(*keys)]
        leaves = [x.detach().requires_grad_() for x in (q[slice(*rows)], k[seen], v[seen])]
        own = torch.arange(len(leaves[0]), device=q.device), torch.arange(len(seen), device=q.device)
        ends_of_one = tuple(torch.tensor([0, len(x)]) for x in own)
        one = replace(job, gathered=own[1], ends=ends_of_one)
        with torch.enable_grad():
            out = along_each_segment(one, *leaves)
        by_q, *by_kv = torch.autograd.grad(out, leaves, by_out[slice(*rows)].to(out.dtype))
        result[0][slice(*rows)] = by_q
        for total, part in zip(result[1:], by_kv, strict=True):
            total.index_add_(0, seen, part.to(total.dtype))
    return result


def gradients_of(attend: Callable[..., Tensor], by_out: Tensor, *inputs: Tensor) -> Callable[[], Gradients]:
    """Make a function that takes the gradients of one forward repeatedly; its first call runs the forward."""

    @functools.cache
    def graph() -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            return attend(*leaves), leaves

    def run() -> Gradients:
        out, leaves = graph()
        return torch.autograd.grad(out, leaves, by_out, retain_graph=True)

    return run


def gradient_check(reference: Callable[..., Gradients], *inputs: Tensor) -> Callable[[Gradients], dict[str, float]]:
    """Hold gradients to `reference` of the inputs in float64."""
    exact, low = reference(*(x.double() for x in inputs)), reference(*inputs)
    return ErrorBudgets.of(exact, low, inputs[0].dtype, ("by q", "by k", "by v")).check


def backward_contenders(job: AttentionJob) -> list[Contender]:
    inputs, shape = (job.q, job.k, job.v), equal_sequences(job)
    generator = torch.Generator(job.q.device).manual_seed(SEED)
    by_out, by_equal = (
        torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in (job.q, shape[0])
    )
    tree = gradient_check(functools.partial(gradients_along_each_segment, job, by_out), *inputs)

    def of_first(*first: Tensor) -> Gradients:
        return gradients_of(plain, by_equal[:1].to(first[0].dtype), *first)()

    equal = gradient_check(of_first, *(x[:1] for x in shape))
    run = {
        OURS: gradients_of(lambda q, k, v: ours_attention(replace(job, q=q, k=k, v=v)), by_out, *inputs),
        FLASH: gradients_of(flash, by_equal, *shape),
        DEFAULT: gradients_of(sdpa, by_equal, *shape),
    }
    checks = dict.fromkeys((FLASH, DEFAULT), lambda found: equal(tuple(x[:1] for x in found)))
    return [Contender(name, take, checks.get(name, tree)) for name, take in run.items()]
