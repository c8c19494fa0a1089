"""Race the two forward kernels: tree attention against flash attention, log-probs against what the device can do."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.ceilings import measure_ceilings
from benchmarks.harness.options import workload_set
from benchmarks.harness.race import (
    Absent,
    Budget,
    Contender,
    Figures,
    Lap,
    race,
    release_memory,
    replay_clock,
    times_ours,
)
from benchmarks.harness.workloads import HEADS, MODELS, SEED, Job, gsm8k_job, head_dim, long_job, random_model
from benchmarks.speed.reference import ErrorBudget
from benchmarks.speed.varlen import causal_varlen_attention
from cfa_kernels import ScoredBatch, linear_logprob
from cfa_kernels.ops.segment_table import SegmentTable
from cfa_kernels.ops.tree_attention import tree_attention
from cfa_kernels.scoring.plan import ScoringOptions, plan_scoring

OURS, FLASH, GATHERED = "ours", "flash attention, equal lengths", "keys gathered, varlen attention"
ATTENTION_FLOOR = 0.6  # of the rate of flash attention on as many tokens and pairs in equal causal sequences
BOUND_FLOOR = 0.85  # of the rate that bandwidth and GEMM rate allow


# Attention


@dataclass(frozen=True)
class Trees:
    """Whose attention heads, in which dtype, and the job whose trees they attend along."""

    model: str
    dtype: torch.dtype
    job: Callable[[], Job]


ATTENTION: dict[str, dict[str, Trees]] = {
    "smoke": {"tiny": Trees("qwen3-tiny", torch.float32, functools.partial(gsm8k_job, 1))},
    "cpu": {"qwen3-40m gsm8k": Trees("qwen3-40m", torch.float32, functools.partial(gsm8k_job, 4))},
    "cuda": {
        **{
            f"{model} gsm8k": Trees(model, torch.bfloat16, functools.partial(gsm8k_job, 16))
            for model in ("Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.2-3B")
        },
        "Qwen3-1.7B long": Trees("Qwen3-1.7B", torch.bfloat16, functools.partial(long_job, 2)),
    },
}


@dataclass(frozen=True)
class AttentionJob:
    """q (N, H, D), k and v (N, Hkv, D) of one pack, and what gathering keys per segment needs."""

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


def make_attention_job(trees: Trees, device: torch.device) -> AttentionJob:
    job, config = trees.job(), MODELS[trees.model]
    model = random_model(trees.model, device=torch.device("meta"), dtype=trees.dtype)
    batch = ScoredBatch.of(
        model, job.prompts, job.completions, job.spans, job.answers,
        placeholder_id=job.placeholder_id, token_budget=2**31,
    )  # fmt: skip
    (pack,) = plan_scoring(model, batch, ScoringOptions()).packs
    table, generator = pack.table, torch.Generator(device).manual_seed(SEED)
    q, k, v = (
        torch.randn(table.num_rows, count, head_dim(config), generator=generator, device=device).to(trees.dtype)
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


def gathered_varlen(job: AttentionJob) -> Tensor:
    """Keys and values gathered per segment, then PyTorch's own attention over ragged sequences."""
    if not job.q.is_cuda:
        raise Absent("PyTorch's attention over ragged sequences runs on a GPU")
    k, v = (x.index_select(0, job.gathered) for x in (job.k, job.v))
    paths = job.table.context_length + job.table.length
    return causal_varlen_attention(job.q, k, v, job.ends, (int(job.table.length.max()), int(paths.max())))


def flash(shape: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Causal attention of (batch, heads, length, D); on a GPU by flash attention and nothing else."""
    q, k, v = shape
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION] if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


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


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`flash` by explicit softmax."""
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attention_contenders(job: AttentionJob) -> list[Contender]:
    tree = ErrorBudget.of(functools.partial(along_each_segment, job), job.q, job.k, job.v)
    shape = equal_sequences(job)
    equal = ErrorBudget.of(plain, *(x[:1] for x in shape))
    return [
        Contender(OURS, functools.partial(ours_attention, job), tree.check),
        Contender(GATHERED, functools.partial(gathered_varlen, job), tree.check),
        Contender(FLASH, functools.partial(flash, shape), lambda out: equal.check(out[:1])),
    ]


# Log-probs


@dataclass(frozen=True)
class Rows:
    """Rows, hidden size and vocabulary."""

    rows: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.hidden * self.vocabulary

    @property
    def moved(self) -> float:
        """Bytes: head and hidden states read once; the results are nothing beside them."""
        return float((self.rows + self.vocabulary) * self.hidden * self.dtype.itemsize)

    def bound(self, ceilings: dict[str, Any]) -> float:
        """Seconds that bandwidth and GEMM rate allow at best."""
        return max(self.moved / (ceilings["copy_gb_per_s"] * 1e9), self.flops / (ceilings["gemm_tflop_per_s"] * 1e12))


LOGPROB: dict[str, dict[str, Rows]] = {
    "smoke": {"tiny, 5 rows": Rows(5, 24, 160, torch.float32)},
    "cpu": {f"qwen3-40m, {rows} rows": Rows(rows, 512, 32_768, torch.float32) for rows in (16, 512)},
    "cuda": {
        f"{model}, {rows} rows": Rows(rows, *sizes, torch.bfloat16)
        for model, sizes in HEADS.items()
        for rows in (16, 512, 6000)
    },
}


def logits_logprob(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Log-probs (M,) from logits held as a whole."""
    logits = F.linear(hidden, head)
    return logits.to(wide_dtype(logits)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def logprob_contenders(shape: Rows, device: torch.device) -> list[Contender]:
    options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(SEED), "device": device}
    hidden = torch.randn(shape.rows, shape.hidden, **options).to(shape.dtype)
    head = (2 * torch.randn(shape.vocabulary, shape.hidden, **options) / shape.hidden**0.5).to(shape.dtype)
    targets = torch.randint(shape.vocabulary, (shape.rows,), **options)

    def reference(hidden: Tensor, head: Tensor) -> Tensor:
        parts = zip(hidden.split(512), targets.split(512), strict=True)
        return torch.cat([logits_logprob(rows, head, ids) for rows, ids in parts])

    def entropies(hidden: Tensor, head: Tensor) -> Tensor:
        parts = [F.linear(rows, head) for rows in hidden.split(512)]
        return torch.cat(
            [torch.distributions.Categorical(logits=part.to(wide_dtype(part))).entropy() for part in parts]
        )

    logprobs = ErrorBudget.of(reference, hidden, head)
    entropy = ErrorBudget.of(entropies, hidden, head)

    def check_both(result: tuple[Tensor, Tensor]) -> dict[str, float]:
        shares = logprobs.check(result[0]), entropy.check(result[1], "entropy")
        return {"error_over_budget": max(share["error_over_budget"] for share in shares)}

    return [
        Contender(OURS, lambda: linear_logprob(hidden, head, targets), logprobs.check),
        Contender("ours, with entropy", lambda: linear_logprob(hidden, head, targets, return_entropy=True), check_both),
        Contender("logits, log_softmax", lambda: logits_logprob(hidden, head, targets), logprobs.check),
    ]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# Tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, workloads in (
        ("attention_workload", ATTENTION),
        ("logprob_workload", LOGPROB),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(workloads[workload_set(metafunc.config)]), scope="module")


@pytest.fixture(scope="module")
def ceilings(request: pytest.FixtureRequest, device: torch.device) -> dict[str, Any]:
    """Measured in this process, right before the kernels that are held to them."""
    return measure_ceilings(device, smoke=workload_set(request.config) == "smoke")


@pytest.fixture(scope="module")
def attention_job(
    request: pytest.FixtureRequest, attention_workload: str, device: torch.device
) -> Iterator[AttentionJob]:
    yield make_attention_job(ATTENTION[workload_set(request.config)][attention_workload], device)
    release_memory(device)


@pytest.fixture(scope="module")
def attention_laps(
    attention_job: AttentionJob, attention_workload: str, device: torch.device, budget: Budget, figures: Figures
) -> dict[str, Lap]:
    figures.workloads[f"attention {attention_workload}"] = attention_job.describe()
    with torch.no_grad():
        return race(attention_contenders(attention_job), device=device, budget=budget, clock="device")


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [OURS, GATHERED, FLASH])
def test_attention_time(
    attention_laps: dict[str, Lap],
    attention_job: AttentionJob,
    attention_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    flops = attention_job.flash_flops if name == FLASH else attention_job.flops
    report(attention_laps[name], group=f"attention {attention_workload}", flops=flops)


def test_attention_keeps_its_share_of_flash_attentions_rate(
    pytestconfig: pytest.Config,
    attention_laps: dict[str, Lap],
    attention_job: AttentionJob,
    attention_workload: str,
    hold: Callable[..., None],
) -> None:
    ratios = times_ours(attention_laps)
    if FLASH in ratios:
        ratios[FLASH] *= attention_job.flops / attention_job.flash_flops  # per operation
    floors = {FLASH: ATTENTION_FLOOR, GATHERED: 1.0} if workload_set(pytestconfig) == "cuda" else {}
    hold(f"attention {attention_workload}", ratios, floors)


@pytest.fixture(scope="module")
def logprob_laps(
    request: pytest.FixtureRequest,
    logprob_workload: str,
    ceilings: dict[str, Any],
    device: torch.device,
    budget: Budget,
    figures: Figures,
) -> Iterator[dict[str, Lap]]:
    shape = LOGPROB[workload_set(request.config)][logprob_workload]
    figures.workloads[f"log-probs {logprob_workload}"] = {
        "rows": shape.rows,
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "bound_seconds": shape.bound(ceilings),
        "seed": SEED,
    }
    with torch.no_grad():
        yield race(logprob_contenders(shape, device), device=device, budget=budget, clock="device")
    release_memory(device)


@pytest.mark.benchmark(timer=replay_clock)
@pytest.mark.parametrize("name", [OURS, "ours, with entropy", "logits, log_softmax"])
def test_logprob_time(
    pytestconfig: pytest.Config,
    logprob_laps: dict[str, Lap],
    logprob_workload: str,
    name: str,
    report: Callable[..., None],
) -> None:
    shape = LOGPROB[workload_set(pytestconfig)][logprob_workload]
    report(logprob_laps[name], group=f"log-probs {logprob_workload}", flops=shape.flops, bytes=shape.moved)


def test_logprobs_come_near_what_the_device_allows(
    pytestconfig: pytest.Config,
    logprob_laps: dict[str, Lap],
    logprob_workload: str,
    ceilings: dict[str, Any],
    hold: Callable[..., None],
) -> None:
    sizes = workload_set(pytestconfig)
    ratios = times_ours(logprob_laps)
    ratios["bound"] = LOGPROB[sizes][logprob_workload].bound(ceilings) / logprob_laps[OURS].median
    hold(f"log-probs {logprob_workload}", ratios, {"bound": BOUND_FLOOR} if sizes == "cuda" else {})
